# Large or slow requests through S3; nothing runs while nothing waits.

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

  name      = "remora-async"
  mode      = "async"
  model_uri = "s3://example-models/repository/"
  image_uri = var.image_uri
  capacity  = { min = 0, max = 4 }
  async     = { input_uri = "s3://example-requests/remora", output_uri = "s3://example-answers/remora" }
}

output "invoke" {
  description = "A command that asks the endpoint."
  value       = module.remora.invoke
}
