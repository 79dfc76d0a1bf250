# Two models on the same GPU instances, and no instance while no requests arrive. The first requests fail until one is there: retry them.

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

  name          = "remora-idle"
  mode          = "scale-to-zero"
  model_uri     = "s3://example-models/repository/"
  image_uri     = var.image_uri
  gpu_image     = true
  instance_type = "ml.g6.12xlarge"
  capacity      = { min = 0, max = 2 }
  component     = { memory_mb = 8192 }
  components = {
    small = { model_uri = "s3://example-models/small/", memory_mb = 2048, copies = { min = 0, max = 4 } }
  }
}

output "invoke" {
  description = "A command that asks the endpoint."
  value       = module.remora.invoke
}
