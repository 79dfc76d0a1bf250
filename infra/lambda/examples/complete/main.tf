# A function for arm64 in a VPC with models from S3, two environments kept warm, traces, a key, a role within a boundary, and a budget.

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
  description = "An image in ECR made from containers/lambda for arm64, by digest."
  type        = string
}

module "remora" {
  source = "../.."

  name                     = "remora-complete"
  image_uri                = var.image_uri
  model_uri                = "s3://example-models/small/"
  architecture             = "arm64"
  memory_mb                = 3538
  scratch_mb               = 2048
  timeout_seconds          = 60
  kept_warm                = 2
  max_concurrency          = 20
  tracing                  = true
  environment              = { REMORA_LOG_LEVEL = "warn" }
  permissions_boundary_arn = "arn:aws:iam::111122223333:policy/boundary"
  subnet_ids               = ["subnet-0a", "subnet-0b"]
  security_group_ids       = ["sg-0a"]
  kms_key_arn              = "arn:aws:kms:eu-west-1:111122223333:key/models"
  log_days                 = 90
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
  description = "A command that asks the function."
  value       = module.remora.invoke
}

output "function_url" {
  description = "Where the function answers signed requests."
  value       = module.remora.function_url
}
