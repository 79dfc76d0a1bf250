# A function for arm64 with models from S3, two environments kept warm, traces, and a role within a boundary.

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
  log_days                 = 90
  tags                     = { team = "vision" }
}

output "invoke" {
  description = "A command that asks the function."
  value       = module.remora.invoke
}

output "function_url" {
  description = "Where the function answers signed requests."
  value       = module.remora.function_url
}
