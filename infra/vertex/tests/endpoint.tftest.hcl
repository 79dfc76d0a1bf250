# The endpoint, and the commands that fill it.

mock_provider "google" {
  mock_resource "google_service_account" {
    defaults = { email = "remora@example-project.iam.gserviceaccount.com" }
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
