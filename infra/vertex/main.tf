# What Vertex AI needs for remora: endpoint, account, rights, a place for images. The provider has no resource that uploads
# a model with its own container or deploys one: the output `deploy` holds the commands that do.

locals {
  bucket  = split("/", trimprefix(var.model_uri, "gs://"))[0]
  account = var.service_account != null ? var.service_account : google_service_account.this[0].email
}

resource "google_service_account" "this" {
  count        = var.service_account == null ? 1 : 0
  project      = var.project_id
  account_id   = var.name
  display_name = "remora on Vertex AI"
}

resource "google_storage_bucket_iam_member" "models" {
  bucket = local.bucket
  role   = "roles/storage.objectViewer"
  member = "serviceAccount:${local.account}"
}

moved {
  from = google_service_account.this
  to   = google_service_account.this[0]
}

# Pulled by Vertex AI's own service agent, which may read the repositories of its project.
resource "google_artifact_registry_repository" "images" {
  project       = var.project_id
  location      = var.region
  repository_id = var.name
  format        = "DOCKER"
  kms_key_name  = var.encryption_key
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

  dynamic "encryption_spec" {
    for_each = var.encryption_key == null ? [] : [var.encryption_key]
    content {
      kms_key_name = encryption_spec.value
    }
  }
  dynamic "predict_request_response_logging_config" {
    for_each = var.capture == null ? [] : [var.capture]
    content {
      enabled       = true
      sampling_rate = predict_request_response_logging_config.value.percent / 100
      bigquery_destination {
        output_uri = predict_request_response_logging_config.value.table
      }
    }
  }
}
