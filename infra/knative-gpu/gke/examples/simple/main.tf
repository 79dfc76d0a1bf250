# Up to four L4 nodes, none while idle.

terraform {
  required_version = ">= 1.9"
  required_providers {
    google = {
      source  = "hashicorp/google"
      version = ">= 6.50, < 8"
    }
  }
}

module "gpu" {
  source       = "../.."
  project_id   = "example-project"
  cluster_name = "example"
  location     = "europe-west1"
  node_zones   = ["europe-west1-b"]
}
