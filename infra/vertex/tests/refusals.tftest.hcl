# What the module refuses, each by its own message.

mock_provider "google" {}

variables {
  project_id = "example-project"
  region     = "europe-west1"
  model_uri  = "gs://example-models/repository"
  image_uri  = "registry.example/remora@sha256:0000000000000000000000000000000000000000000000000000000000000000"
}

run "models_outside_cloud_storage" {
  command = plan
  variables {
    model_uri = "az://bucket/models"
  }
  expect_failures = [var.model_uri]
}

run "an_image_by_tag" {
  command = plan
  variables {
    image_uri = "registry.example/remora:1"
  }
  expect_failures = [var.image_uri]
}

run "no_replicas_at_all" {
  command = plan
  variables {
    replicas = { min = 0, max = 1 }
  }
  expect_failures = [var.replicas]
}

run "an_accelerator_nobody_makes" {
  command = plan
  variables {
    machine = { type = "g2-standard-8", accelerator = "l4" }
  }
  expect_failures = [var.machine]
}

run "a_name_too_short_for_an_account" {
  command = plan
  variables {
    name = "r"
  }
  expect_failures = [var.name]
}

run "a_gpu_below_an_image_without_cuda" {
  command = plan
  variables {
    machine = { type = "g2-standard-8", accelerator = "NVIDIA_L4" }
  }
  expect_failures = [var.machine]
}

run "a_capture_outside_of_bigquery" {
  command = plan
  variables {
    capture = { table = "gs://bucket/captured" }
  }
  expect_failures = [var.capture]
}
