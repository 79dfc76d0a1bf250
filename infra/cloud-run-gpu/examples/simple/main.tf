# A model on one L4, without instances while no requests arrive, called by one application.

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
  description = "The image cuda12 of `remora image build`, by digest."
  type        = string
}

module "remora" {
  source     = "../.."
  project_id = "example-project"
  region     = "europe-west1"
  model_uri  = "gs://example-models/repository"
  image_uri  = var.image_uri
  image_cuda = 12
  gpu        = "nvidia-l4"
  invokers   = ["serviceAccount:app@example-project.iam.gserviceaccount.com"]
}

output "url" {
  description = "Where the service answers."
  value       = module.remora.url
}
