# The endpoint, and the commands that fill it.

mock_provider "google" {
  mock_resource "google_service_account" {
    defaults = { email = "remora@example-project.iam.gserviceaccount.com" }
  }
  mock_resource "google_vertex_ai_endpoint" {
    defaults = { dedicated_endpoint_dns = "remora.europe-west1-1.prediction.vertexai.goog" }
  }
}

variables {
  project_id = "example-project"
  region     = "europe-west1"
  model_uri  = "gs://example-models/repository"
  image_uri  = "registry.example/remora@sha256:0000000000000000000000000000000000000000000000000000000000000000"
}

run "the_commands_name_what_was_made" {
  command = apply
  variables {
    gpu_image = true
    machine   = { type = "g2-standard-8", accelerator = "NVIDIA_L4" }
  }
  assert {
    condition     = strcontains(output.deploy[0], "--model-id=${local.model_id} ") && strcontains(output.deploy[1], "--model=${local.model_id} ")
    error_message = "nothing is left to paste between the two commands"
  }
  assert {
    condition     = startswith(output.endpoint_url, "https://remora.europe-west1-1.prediction.vertexai.goog/v1/") && strcontains(output.invoke, ":predict")
    error_message = "a dedicated endpoint answers at its own name only"
  }
  assert {
    condition     = strcontains(output.deploy[0], "--artifact-uri=gs://example-models/repository") && strcontains(output.deploy[0], "@sha256:")
    error_message = "the upload names models and image"
  }
  assert {
    condition     = strcontains(output.deploy[1], "--accelerator=type=nvidia-l4,count=1") && strcontains(output.deploy[1], "--service-account=remora@")
    error_message = "the deployment names the GPU and the account that may read the models"
  }
}

run "without_a_gpu_none_is_asked_for" {
  command = apply
  variables {
    machine = { type = "n2-standard-4" }
  }
  assert {
    condition     = !strcontains(output.deploy[1], "--accelerator")
    error_message = "no accelerator"
  }
}

run "a_shared_endpoint_answers_at_the_shared_name" {
  command = apply
  variables {
    dedicated = false
  }
  assert {
    condition     = startswith(output.endpoint_url, "https://europe-west1-aiplatform.googleapis.com/v1/")
    error_message = "the region's name"
  }
}

run "requests_are_captured_under_a_key_as_an_account_that_is_there" {
  command = plan
  variables {
    service_account = "serving@example-project.iam.gserviceaccount.com"
    encryption_key  = "projects/p/locations/europe-west1/keyRings/ml/cryptoKeys/remora"
    capture         = { table = "bq://p.captured.digits", percent = 20 }
  }
  assert {
    condition     = google_vertex_ai_endpoint.this.predict_request_response_logging_config[0].sampling_rate == 0.2 && google_vertex_ai_endpoint.this.predict_request_response_logging_config[0].bigquery_destination[0].output_uri == "bq://p.captured.digits"
    error_message = "a fifth of the requests is captured"
  }
  assert {
    condition     = google_vertex_ai_endpoint.this.encryption_spec[0].kms_key_name == var.encryption_key && google_artifact_registry_repository.images.kms_key_name == var.encryption_key
    error_message = "endpoint and repository have the key"
  }
  assert {
    condition     = length(google_service_account.this) == 0 && strcontains(output.deploy[1], "--service-account=serving@example-project.iam.gserviceaccount.com")
    error_message = "no account beside the one that is named"
  }
}
