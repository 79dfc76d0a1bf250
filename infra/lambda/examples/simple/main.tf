# A small model from S3, on two processors.

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
  description = "An image in ECR made from containers/lambda, by digest."
  type        = string
}

module "remora" {
  source    = "../.."
  name      = "remora"
  image_uri = var.image_uri
  model_uri = "s3://example-models/small/"
}

output "function_url" {
  description = "Where the function answers."
  value       = module.remora.function_url
}
