# GPU nodes for a GKE cluster: tainted, with their driver, and none of them while no pod asks.

locals {
  account = var.service_account != null ? var.service_account : google_service_account.node[0].email
  # An account's id has 30 characters: what is longer would be cut to the same for every pool of a cluster.
  pool       = "${var.cluster_name}-${var.name}"
  account_id = length(local.pool) <= 30 ? local.pool : "${substr(local.pool, 0, 21)}-${substr(sha256(local.pool), 0, 8)}"
}

resource "google_service_account" "node" {
  count        = var.service_account == null ? 1 : 0
  project      = var.project_id
  account_id   = local.account_id
  display_name = "GPU nodes of ${var.cluster_name}"
}

resource "google_project_iam_member" "node" {
  for_each = toset(var.service_account == null ? ["roles/logging.logWriter", "roles/monitoring.metricWriter", "roles/artifactregistry.reader"] : [])
  project  = var.project_id
  role     = each.value
  member   = "serviceAccount:${local.account}"
}

moved {
  from = google_service_account.node
  to   = google_service_account.node[0]
}

resource "google_container_node_pool" "this" {
  project            = var.project_id
  name               = var.name
  cluster            = var.cluster_name
  location           = var.location
  node_locations     = length(var.node_zones) > 0 ? var.node_zones : null
  initial_node_count = var.nodes.min

  autoscaling {
    total_min_node_count = var.nodes.min
    total_max_node_count = var.nodes.max
    location_policy      = "ANY"
  }
  management {
    auto_repair  = true
    auto_upgrade = true
  }

  node_config {
    machine_type    = var.machine_type
    disk_size_gb    = var.disk_gib
    disk_type       = "pd-balanced"
    image_type      = "COS_CONTAINERD"
    spot            = var.spot
    service_account = local.account
    oauth_scopes    = ["https://www.googleapis.com/auth/cloud-platform"]
    labels          = { "remora.dev/pool" = var.name }
    resource_labels = var.labels

    guest_accelerator {
      type  = var.gpu.type
      count = var.gpu.count
      gpu_driver_installation_config {
        gpu_driver_version = "LATEST"
      }
    }
    taint {
      key    = "nvidia.com/gpu"
      value  = "present"
      effect = "NO_SCHEDULE"
    }
    # Images begin to run before all of them has arrived.
    gcfs_config {
      enabled = true
    }
    workload_metadata_config {
      mode = "GKE_METADATA"
    }
    shielded_instance_config {
      enable_secure_boot          = true
      enable_integrity_monitoring = true
    }
  }

  lifecycle {
    ignore_changes = [initial_node_count]
  }
  depends_on = [google_project_iam_member.node]
}
