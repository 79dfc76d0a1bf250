# What the module refuses, each by its own message.

mock_provider "azurerm" {}

variables {
  cluster_id = "/subscriptions/0/resourceGroups/example/providers/Microsoft.ContainerService/managedClusters/example"
}

run "a_cluster_by_its_name" {
  command = plan
  variables {
    cluster_id = "example"
  }
  expect_failures = [var.cluster_id]
}

run "a_size_without_gpu" {
  command = plan
  variables {
    vm_size = "Standard_D4s_v5"
  }
  expect_failures = [var.vm_size]
}

run "a_name_with_a_hyphen" {
  command = plan
  variables {
    name = "gpu-pool"
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
