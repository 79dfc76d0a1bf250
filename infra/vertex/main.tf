# What Vertex AI needs for remora: endpoint, account, rights, a place for images. The provider has no resource that uploads
# a model with its own container or deploys one: the output `deploy` holds the commands that do.

locals {
  bucket = split("/", trimprefix(var.model_uri, "gs://"))[0]
}

resource "google_service_account" "this" {
  project      = var.project_id
  account_id   = var.name
  display_name = "remora on Vertex AI"
}

resource "google_storage_bucket_iam_member" "models" {
  bucket = local.bucket
  role   = "roles/storage.objectViewer"
  member = "serviceAccount:${google_service_account.this.email}"
}

# Pulled by Vertex AI's own service agent, which may read the repositories of its project.
resource "google_artifact_registry_repository" "images" {
  project       = var.project_id
  location      = var.region
  repository_id = var.name
  format        = "DOCKER"
  labels        = var.labels
  docker_config {
    immutable_tags = true
  }
}

resource "google_vertex_ai_endpoint" "this" {
  project                    = var.project_id
  location                   = var.region
  name                       = var.name
  display_name               = var.name
  dedicated_endpoint_enabled = var.dedicated
  labels                     = var.labels
}
