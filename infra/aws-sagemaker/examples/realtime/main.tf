# A GPU endpoint that is always there, between one and four instances.

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

module "remora" {
  source = "../.."

  name          = "remora-realtime"
  model_uri     = "s3://example-models/repository/"
  image_uri     = var.image_uri
  gpu_image     = true
  instance_type = "ml.g5.xlarge"
  capacity      = { min = 1, max = 4 }
}

output "invoke" {
  description = "A command that asks the endpoint."
  value       = module.remora.invoke
}
