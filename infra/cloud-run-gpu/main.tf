# remora on Cloud Run, with a GPU for each instance and none at night.

locals {
  bucket  = split("/", trimprefix(var.model_uri, "gs://"))[0]
  folder  = trimprefix(var.model_uri, "gs://${local.bucket}/")
  account = var.service_account != null ? var.service_account : google_service_account.this[0].email
  limits = merge(
    { cpu = tostring(var.resources.cpu), memory = "${var.resources.memory_gib}Gi" },
    var.gpu == null ? {} : { "nvidia.com/gpu" = "1" },
  )
}

resource "google_service_account" "this" {
  count        = var.service_account == null ? 1 : 0
  project      = var.project_id
  account_id   = var.name
  display_name = "remora on Cloud Run"
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

resource "google_cloud_run_v2_service" "this" {
  project             = var.project_id
  name                = var.name
  location            = var.region
  deletion_protection = var.deletion_protection
  ingress             = var.ingress
  labels              = var.labels

  template {
    service_account                  = local.account
    execution_environment            = "EXECUTION_ENVIRONMENT_GEN2"
    timeout                          = "${var.timeout_seconds}s"
    max_instance_request_concurrency = var.concurrency
    encryption_key                   = var.encryption_key
    # A GPU that must also be there in a second zone costs more and starts later.
    gpu_zonal_redundancy_disabled = var.gpu == null ? null : true

    scaling {
      min_instance_count = var.instances.min
      max_instance_count = var.instances.max
    }

    dynamic "vpc_access" {
      for_each = var.network == null ? [] : [var.network]
      content {
        egress = vpc_access.value.egress
        network_interfaces {
          network    = vpc_access.value.network
          subnetwork = vpc_access.value.subnetwork
        }
      }
    }

    dynamic "node_selector" {
      for_each = var.gpu == null ? [] : [var.gpu]
      content {
        accelerator = node_selector.value
      }
    }

    volumes {
      name = "models"
      gcs {
        bucket    = local.bucket
        read_only = true
      }
    }

    containers {
      image   = var.image_uri
      command = ["python", "-m", "remora_adapters.cloud_run"]
      # Not ready while the GPU is idle: a driver too old, or a model for processors.
      args = concat(["/mnt/models/${local.folder}"], var.gpu == null ? [] : ["--require-gpu"], var.arguments)

      dynamic "env" {
        for_each = var.environment
        content {
          name  = env.key
          value = env.value
        }
      }
      dynamic "env" {
        for_each = var.secrets
        content {
          name = env.key
          value_source {
            secret_key_ref {
              secret  = env.value
              version = "latest"
            }
          }
        }
      }

      ports {
        container_port = 8080
      }
      resources {
        limits            = local.limits
        startup_cpu_boost = true
        # With a GPU an instance has its processors all the time: Cloud Run asks for it.
        cpu_idle = var.gpu == null
      }
      volume_mounts {
        name       = "models"
        mount_path = "/mnt/models"
      }
      startup_probe {
        period_seconds    = 1
        timeout_seconds   = 1
        failure_threshold = var.startup_seconds
        http_get {
          path = "/v2/health/ready"
        }
      }
      liveness_probe {
        period_seconds    = 10
        timeout_seconds   = 5
        failure_threshold = 6
        http_get {
          path = "/v2/health/live"
        }
      }
    }
  }

  depends_on = [google_storage_bucket_iam_member.models]
}

resource "google_cloud_run_v2_service_iam_member" "invokers" {
  for_each = toset(var.invokers)
  project  = var.project_id
  location = var.region
  name     = google_cloud_run_v2_service.this.name
  role     = "roles/run.invoker"
  member   = each.value
}
