# Processors by the request, for small models and rare requests.

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
  description = "The image built from containers/sagemaker, by digest."
  type        = string
}

module "remora" {
  source = "../.."

  name       = "remora-serverless"
  mode       = "serverless"
  model_uri  = "s3://example-models/small.tar.gz"
  image_uri  = var.image_uri
  serverless = { memory_mb = 3072, max_concurrency = 10 }
}

output "invoke" {
  description = "A command that asks the endpoint."
  value       = module.remora.invoke
}
