# A GPU endpoint in a VPC with keys, a boundary, a gradual rollout, more instances by day, the release before the current one, and a budget.

terraform {
  required_version = ">= 1.9"
  required_providers {
    aws = {
      source  = "hashicorp/aws"
      version = ">= 5.100, < 7"
    }
  }
}

variable "image_uri" {
  description = "The image built from containers/sagemaker with the gpu extra, by digest."
  type        = string
}

variable "previous" {
  description = "The output `releases` of the last apply."
  type        = list(object({ image_uri = string, model_uri = string, environment = optional(map(string), {}) }))
  default     = []
}

module "remora" {
  source = "../.."

  name          = "remora-complete"
  model_uri     = "s3://example-models/digits/2/"
  image_uri     = var.image_uri
  gpu_image     = true
  instance_type = "ml.g6.xlarge"
  previous      = var.previous
  environment   = { REMORA_LOG_LEVEL = "warn" }

  capacity           = { min = 2, max = 8, initial = 4 }
  target_concurrency = 22
  cooldown_seconds   = { in = 600, out = 60 }
  rollout            = { type = "LINEAR", step_percent = 25, watch_seconds = 600 }
  schedule = {
    morning = { at = "cron(0 7 ? * MON-FRI *)", min = 4, max = 8, timezone = "Europe/Berlin" }
    evening = { at = "cron(0 19 ? * MON-FRI *)", min = 2, max = 4, timezone = "Europe/Berlin" }
  }
  alarm = { errors = 1, latency_p99_seconds = 0.5, topic_arns = ["arn:aws:sns:eu-west-1:111122223333:on-call"] }

  subnet_ids               = ["subnet-0a", "subnet-0b"]
  security_group_ids       = ["sg-0a"]
  objects_kms_key_arn      = "arn:aws:kms:eu-west-1:111122223333:key/models"
  permissions_boundary_arn = "arn:aws:iam::111122223333:policy/boundary"
  tags                     = { team = "vision" }
}

# By the month, and by the tag, which has to be active as a cost allocation tag.
resource "aws_budgets_budget" "team" {
  name         = "remora-complete"
  budget_type  = "COST"
  limit_amount = "500"
  limit_unit   = "USD"
  time_unit    = "MONTHLY"

  cost_filter {
    name   = "TagKeyValue"
    values = ["user:team$vision"]
  }
  notification {
    comparison_operator        = "GREATER_THAN"
    threshold                  = 80
    threshold_type             = "PERCENTAGE"
    notification_type          = "FORECASTED"
    subscriber_email_addresses = ["on-call@example.com"]
  }
}

output "invoke" {
  description = "A command that asks the endpoint."
  value       = module.remora.invoke
}

output "releases" {
  description = "The value of `previous` for the next apply."
  value       = module.remora.releases
}
