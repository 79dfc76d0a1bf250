# A large GPU for each instance, one always there, reachable from the inside only, with a secret, a key, a private network, and a budget.

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
  description = "The image cuda13 of `remora image build`, by digest."
  type        = string
}

module "remora" {
  source              = "../.."
  project_id          = "example-project"
  region              = "europe-west4"
  name                = "remora-complete"
  model_uri           = "gs://example-models/repository"
  image_uri           = var.image_uri
  image_cuda          = 13
  gpu                 = "nvidia-rtx-pro-6000"
  resources           = { cpu = 20, memory_gib = 80 }
  instances           = { min = 1, max = 4 }
  concurrency         = 64
  environment         = { REMORA_LOG_LEVEL = "warn" }
  secrets             = { HF_TOKEN = "hugging-face" }
  ingress             = "INGRESS_TRAFFIC_INTERNAL_ONLY"
  encryption_key      = "projects/example-project/locations/europe-west4/keyRings/ml/cryptoKeys/remora"
  service_account     = "serving@example-project.iam.gserviceaccount.com"
  network             = { network = "ml", subnetwork = "ml-europe-west4" }
  deletion_protection = true
  invokers            = ["serviceAccount:app@example-project.iam.gserviceaccount.com"]
  labels              = { team = "vision" }
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

output "invoke" {
  description = "A command that asks whether the service is ready."
  value       = module.remora.invoke
}
