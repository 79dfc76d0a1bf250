# What the service looks like, by the provider's schema.

mock_provider "google" {}

variables {
  project_id = "example-project"
  region     = "europe-west1"
  model_uri  = "gs://example-models/repository"
  image_uri  = "registry.example/remora@sha256:0000000000000000000000000000000000000000000000000000000000000000"
}

run "a_gpu_instance" {
  command = plan
  variables {
    gpu        = "nvidia-l4"
    image_cuda = 12
    secrets    = { HF_TOKEN = "hugging-face" }
  }
  assert {
    condition     = google_cloud_run_v2_service.this.template[0].containers[0].env[0].value_source[0].secret_key_ref[0].secret == "hugging-face"
    error_message = "a secret comes out of Secret Manager"
  }
  assert {
    condition     = google_cloud_run_v2_service.this.template[0].containers[0].resources[0].limits["nvidia.com/gpu"] == "1" && google_cloud_run_v2_service.this.template[0].node_selector[0].accelerator == "nvidia-l4"
    error_message = "an instance has its GPU"
  }
  assert {
    condition     = google_cloud_run_v2_service.this.template[0].containers[0].resources[0].cpu_idle == false
    error_message = "with a GPU the processors are always there"
  }
  assert {
    condition     = google_cloud_run_v2_service.this.template[0].containers[0].args == tolist(["/mnt/models/repository", "--require-gpu"])
    error_message = "the models' folder is served, and a server whose GPU is idle is not ready"
  }
  assert {
    condition     = google_cloud_run_v2_service.this.template[0].containers[0].startup_probe[0].failure_threshold == 240
    error_message = "an instance may take as long as it was given"
  }
}

run "without_a_gpu" {
  command = plan
  variables {
    resources = { cpu = 2, memory_gib = 2 }
  }
  assert {
    condition     = length(google_cloud_run_v2_service.this.template[0].node_selector) == 0 && google_cloud_run_v2_service.this.template[0].containers[0].resources[0].cpu_idle
    error_message = "an instance without GPU pays for processors while it answers"
  }
  assert {
    condition     = google_cloud_run_v2_service.this.template[0].containers[0].args == tolist(["/mnt/models/repository"])
    error_message = "no GPU is required where none is paid for"
  }
}

run "it_reaches_a_private_network_as_an_account_that_is_there" {
  command = plan
  variables {
    service_account = "serving@example-project.iam.gserviceaccount.com"
    network         = { network = "ml", subnetwork = "ml-europe-west1" }
  }
  assert {
    condition     = google_cloud_run_v2_service.this.template[0].vpc_access[0].egress == "PRIVATE_RANGES_ONLY" && google_cloud_run_v2_service.this.template[0].vpc_access[0].network_interfaces[0].subnetwork == "ml-europe-west1"
    error_message = "requests to private addresses go by the network"
  }
  assert {
    condition     = length(google_service_account.this) == 0 && google_cloud_run_v2_service.this.template[0].service_account == "serving@example-project.iam.gserviceaccount.com"
    error_message = "no account beside the one that is named"
  }
}
