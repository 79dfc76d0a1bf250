# One L4 for each replica, one to three of them.

terraform {
  required_version = ">= 1.9"
  required_providers {
    google = {
      source  = "hashicorp/google"
      version = "~> 6.50"
    }
  }
}

variable "image_uri" {
  description = "The image built from containers/gpu, by digest."
  type        = string
}

module "remora" {
  source     = "../.."
  project_id = "example-project"
  region     = "europe-west4"
  model_uri  = "gs://example-models/repository"
  image_uri  = var.image_uri
}

output "deploy" {
  description = "What is left to run."
  value       = module.remora.deploy
}
