# What the module refuses, each by its own message.

mock_provider "google" {}

variables {
  project_id   = "example-project"
  cluster_name = "example"
  location     = "europe-west1"
}

run "a_gpu_nobody_offers" {
  command = plan
  variables {
    gpu = { type = "l4", count = 1 }
  }
  expect_failures = [var.gpu]
}

run "three_gpus" {
  command = plan
  variables {
    gpu = { type = "nvidia-l4", count = 3 }
  }
  expect_failures = [var.gpu]
}

run "a_name_in_capitals" {
  command = plan
  variables {
    name = "GPU"
  }
  expect_failures = [var.name]
}

run "more_at_least_than_at_most" {
  command = plan
  variables {
    nodes = { min = 3, max = 2 }
  }
  expect_failures = [var.nodes]
}

run "a_disk_too_small" {
  command = plan
  variables {
    disk_gib = 20
  }
  expect_failures = [var.disk_gib]
}
