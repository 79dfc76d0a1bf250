# What the module refuses, each by its own message.

mock_provider "aws" {}

variables {
  name      = "remora"
  image_uri = "registry.example/remora@sha256:0000000000000000000000000000000000000000000000000000000000000000"
  model_uri = "s3://example-models/small/"
}

run "models_outside_s3" {
  command = plan
  variables {
    model_uri = "gs://bucket/models/"
  }
  expect_failures = [var.model_uri]
}

run "a_prefix_that_takes_its_neighbours" {
  command = plan
  variables {
    model_uri = "s3://bucket/models"
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

run "too_little_memory" {
  command = plan
  variables {
    memory_mb = 128
  }
  expect_failures = [var.memory_mb]
}

run "a_request_of_an_hour" {
  command = plan
  variables {
    timeout_seconds = 3600
  }
  expect_failures = [var.timeout_seconds]
}

run "more_kept_warm_than_may_run" {
  command = plan
  variables {
    kept_warm       = 5
    max_concurrency = 2
  }
  expect_failures = [var.max_concurrency]
}

run "subnets_without_a_security_group" {
  command = plan
  variables {
    subnet_ids = ["subnet-1"]
  }
  expect_failures = [var.security_group_ids]
}
