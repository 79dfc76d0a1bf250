# Many models for processors on one endpoint: the archive that a request names is loaded when it is needed.

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

  name      = "remora-many"
  mode      = "multi-model"
  model_uri = "s3://example-models/archives/"
  image_uri = var.image_uri
  capacity  = { min = 1, max = 4 }
}

output "invoke" {
  description = "A command that asks the endpoint."
  value       = module.remora.invoke
}
