# Two to six replicas with two GPUs each, on a shared endpoint, with a key, captured requests, and a budget.

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
  name       = "remora-complete"
  model_uri  = "gs://example-models/repository"
  image_uri  = var.image_uri
  gpu_image  = true
  machine    = { type = "g2-standard-24", accelerator = "NVIDIA_L4", accelerators = 2 }
  replicas   = { min = 2, max = 6 }
  dedicated  = false
  labels     = { team = "vision" }

  service_account = "serving@example-project.iam.gserviceaccount.com"
  encryption_key  = "projects/example-project/locations/europe-west4/keyRings/ml/cryptoKeys/remora"
  capture         = { table = "bq://example-project.captured.remora", percent = 10 }
}

# By the month, and by the label.
resource "google_billing_budget" "team" {
  billing_account = "000000-000000-000000"
  display_name    = "remora-complete"

  budget_filter {
    projects = ["projects/example-project"]
    labels   = { team = "vision" }
  }
  amount {
    specified_amount {
      currency_code = "USD"
      units         = "500"
    }
  }
  threshold_rules {
    threshold_percent = 0.8
    spend_basis       = "FORECASTED_SPEND"
  }
}

output "deploy" {
  description = "What is left to run."
  value       = module.remora.deploy
}

output "invoke" {
  description = "A command that asks the endpoint."
  value       = module.remora.invoke
}
