# One L4 for each replica, one to three of them.

terraform {
  required_version = ">= 1.9"
  required_providers {
    google = {
      source  = "hashicorp/google"
      version = ">= 6.50, < 8"
    }
  }
}

variable "image_uri" {
  description = "The image cuda12 or cuda13 of `remora image build`, by digest."
  type        = string
}

module "remora" {
  source     = "../.."
  project_id = "example-project"
  region     = "europe-west4"
  model_uri  = "gs://example-models/repository"
  image_uri  = var.image_uri
  gpu_image  = true
  machine    = { type = "g2-standard-8", accelerator = "NVIDIA_L4" }
}

output "deploy" {
  description = "What is left to run."
  value       = module.remora.deploy
}
