# A cluster in its own network with up to two L4 nodes and an account that reads the models, up to the first answer.

terraform {
  required_version = ">= 1.9"
  required_providers {
    google = {
      source  = "hashicorp/google"
      version = ">= 6.50, < 8"
    }
  }
}

variable "name" {
  description = "What the cluster and all around it are called."
  type        = string
  default     = "remora"
}

variable "image_repository" {
  description = "The repository of the image cuda13 of `remora image build`, without tag."
  type        = string
}

variable "image_tag" {
  description = "The tag of the image."
  type        = string
  default     = "cuda13"
}

variable "project_id" {
  description = "The project."
  type        = string
  default     = "example-project"
}

variable "zone" {
  description = "A zone in which the GPU is offered."
  type        = string
  default     = "europe-west1-b"
}

variable "bucket" {
  description = "The bucket with the model repository, in the folder models."
  type        = string
  default     = "example-models"
}

locals {
  region = join("-", slice(split("-", var.zone), 0, 2))
  labels = { application = var.name }
}

resource "google_compute_network" "this" {
  project                 = var.project_id
  name                    = var.name
  auto_create_subnetworks = false
}

resource "google_compute_subnetwork" "this" {
  project                  = var.project_id
  name                     = var.name
  region                   = local.region
  network                  = google_compute_network.this.id
  ip_cidr_range            = "10.0.0.0/20"
  private_ip_google_access = true
  secondary_ip_range {
    range_name    = "pods"
    ip_cidr_range = "10.16.0.0/14"
  }
  secondary_ip_range {
    range_name    = "services"
    ip_cidr_range = "10.20.0.0/20"
  }
}

resource "google_container_cluster" "this" {
  project             = var.project_id
  name                = var.name
  location            = var.zone
  network             = google_compute_network.this.id
  subnetwork          = google_compute_subnetwork.this.id
  resource_labels     = local.labels
  deletion_protection = false
  # It enforces NetworkPolicy.
  datapath_provider        = "ADVANCED_DATAPATH"
  initial_node_count       = 1
  remove_default_node_pool = true

  ip_allocation_policy {
    cluster_secondary_range_name  = "pods"
    services_secondary_range_name = "services"
  }
  workload_identity_config {
    workload_pool = "${var.project_id}.svc.id.goog"
  }
}

resource "google_container_node_pool" "system" {
  project    = var.project_id
  name       = "system"
  cluster    = google_container_cluster.this.name
  location   = var.zone
  node_count = 2
  node_config {
    machine_type    = "e2-standard-4"
    oauth_scopes    = ["https://www.googleapis.com/auth/cloud-platform"]
    resource_labels = local.labels
    workload_metadata_config {
      mode = "GKE_METADATA"
    }
  }
}

# GKE's own autoscaler takes the nodes away and brings them back.
module "gpu" {
  source       = "../.."
  project_id   = var.project_id
  cluster_name = google_container_cluster.this.name
  location     = var.zone
  nodes        = { min = 0, max = 2 }
  labels       = local.labels
}

resource "google_service_account" "reader" {
  project      = var.project_id
  account_id   = "${var.name}-reader"
  display_name = "remora in ${var.name}"
}

resource "google_storage_bucket_iam_member" "reader" {
  bucket = var.bucket
  role   = "roles/storage.objectViewer"
  member = "serviceAccount:${google_service_account.reader.email}"
}

resource "google_service_account_iam_member" "reader" {
  service_account_id = google_service_account.reader.name
  role               = "roles/iam.workloadIdentityUser"
  member             = "serviceAccount:${var.project_id}.svc.id.goog[default/remora]"
  depends_on         = [google_container_cluster.this]
}

output "next" {
  description = "The commands that are left, from the root of the repository: the last one asks the model."
  value = [
    "gcloud container clusters get-credentials ${google_container_cluster.this.name} --location ${var.zone} --project ${var.project_id}",
    "infra/knative-gpu/install.sh",
    "helm install remora infra/helm/remora --set gpu.count=1 --set replicas=1 --set image.repository=${var.image_repository} --set image.tag=${var.image_tag} --set models.uri=gs://${var.bucket}/models --set-string 'serviceAccount.annotations.iam\\.gke\\.io/gcp-service-account=${google_service_account.reader.email}' --set networkPolicy.metadataServer=gke --wait --timeout=20m",
    "kubectl port-forward service/remora 8000:8000 &",
    "curl localhost:8000/v2/models/digits/infer --json @request.json",
  ]
  depends_on = [module.gpu, google_container_node_pool.system, google_service_account_iam_member.reader]
}
