# What the module refuses, each by its own message.

mock_provider "aws" {
  mock_data "aws_partition" {
    defaults = { partition = "aws" }
  }
}

variables {
  cluster_name = "example"
  subnet_ids   = ["subnet-0example"]
}

run "a_type_without_gpu" {
  command = plan
  variables {
    instance_types = ["m7i.large"]
  }
  expect_failures = [var.instance_types]
}

run "no_subnets" {
  command = plan
  variables {
    subnet_ids = []
  }
  expect_failures = [var.subnet_ids]
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
