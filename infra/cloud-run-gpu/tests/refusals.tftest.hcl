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
    model_uri = "s3://bucket/models"
  }
  expect_failures = [var.model_uri]
}

run "an_image_by_tag" {
  command = plan
  variables {
    image_uri = "registry.example/remora:latest"
  }
  expect_failures = [var.image_uri]
}

run "a_gpu_with_too_little_memory" {
  command = plan
  variables {
    gpu        = "nvidia-l4"
    image_cuda = 12
    resources  = { cpu = 4, memory_gib = 8 }
  }
  expect_failures = [var.resources]
}

run "more_at_least_than_at_most" {
  command = plan
  variables {
    instances = { min = 2, max = 1 }
  }
  expect_failures = [var.instances]
}

run "more_requests_than_an_instance_may_hold" {
  command = plan
  variables {
    concurrency = 2000
  }
  expect_failures = [var.concurrency]
}

run "an_open_door" {
  command = plan
  variables {
    invokers = ["allUsers"]
  }
  expect_failures = [var.invokers]
}

run "a_start_that_takes_too_long" {
  command = plan
  variables {
    startup_seconds = 600
  }
  expect_failures = [var.startup_seconds]
}

run "a_gpu_below_an_image_without_cuda" {
  command = plan
  variables {
    gpu = "nvidia-l4"
  }
  expect_failures = [var.gpu]
}

run "an_l4_below_cuda_13" {
  command = plan
  variables {
    gpu        = "nvidia-l4"
    image_cuda = 13
  }
  expect_failures = [var.gpu]
}

run "a_large_gpu_on_a_small_instance" {
  command = plan
  variables {
    gpu        = "nvidia-rtx-pro-6000"
    image_cuda = 13
  }
  expect_failures = [var.resources]
}

run "a_door_of_another_name" {
  command = plan
  variables {
    ingress = "all"
  }
  expect_failures = [var.ingress]
}

run "traffic_that_does_not_exist" {
  command = plan
  variables {
    network = { network = "ml", subnetwork = "ml", egress = "SOME" }
  }
  expect_failures = [var.network]
}
