# What the module refuses, each by its own message.

mock_provider "azurerm" {}
mock_provider "azapi" {}

variables {
  name                = "remora"
  resource_group_name = "example"
  location            = "westeurope"
  model_uri           = "azureml://datastores/workspaceblobstore/paths/models"
  deployments = {
    blue = { image_uri = "registry.example/remora@sha256:0000000000000000000000000000000000000000000000000000000000000000", traffic = 100 }
  }
}

run "a_name_with_an_underscore" {
  command = plan
  variables {
    name = "remora_endpoint"
  }
  expect_failures = [var.name]
}

run "models_outside_azure" {
  command = plan
  variables {
    model_uri = "s3://bucket/models/"
  }
  expect_failures = [var.model_uri]
}

run "an_image_by_tag" {
  command = plan
  variables {
    deployments = { blue = { image_uri = "registry.example/remora:1", traffic = 100 } }
  }
  expect_failures = [var.deployments]
}

run "shares_that_do_not_add_up" {
  command = plan
  variables {
    deployments = { blue = { image_uri = "registry.example/remora@sha256:0000000000000000000000000000000000000000000000000000000000000000", traffic = 60 } }
  }
  expect_failures = [var.deployments]
}

run "a_mirror_with_live_traffic" {
  command = plan
  variables {
    deployments = { blue = { image_uri = "registry.example/remora@sha256:0000000000000000000000000000000000000000000000000000000000000000", traffic = 100, mirror = 10 } }
  }
  expect_failures = [var.deployments]
}

run "a_request_of_five_minutes" {
  command = plan
  variables {
    deployments = { blue = { image_uri = "registry.example/remora@sha256:0000000000000000000000000000000000000000000000000000000000000000", traffic = 100, timeout_ms = 300000 } }
  }
  expect_failures = [var.deployments]
}

run "no_instances" {
  command = plan
  variables {
    deployments = { blue = { image_uri = "registry.example/remora@sha256:0000000000000000000000000000000000000000000000000000000000000000", traffic = 100, instances = { min = 0, max = 1 } } }
  }
  expect_failures = [var.deployments]
}

run "rules_that_fight_each_other" {
  command = plan
  variables {
    scale_at_percent = { out = 50, in = 40 }
  }
  expect_failures = [var.scale_at_percent]
}

run "a_workspace_by_its_name" {
  command = plan
  variables {
    workspace = "my-workspace"
  }
  expect_failures = [var.workspace]
}

run "gpus_below_an_image_without_cuda" {
  command = plan
  variables {
    deployments = { blue = { image_uri = "registry.example/remora@sha256:0000000000000000000000000000000000000000000000000000000000000000", traffic = 100, instance_type = "Standard_NC4as_T4_v3" } }
  }
  expect_failures = [var.deployments]
}

run "a_deployment_without_models" {
  command = plan
  variables {
    model_uri = null
  }
  expect_failures = [var.deployments]
}

run "a_day_that_ends_before_it_begins" {
  command = plan
  variables {
    schedule = { day = { days = ["Monday"], begin = 19, end = 7, instances = 2 } }
  }
  expect_failures = [var.schedule]
}
