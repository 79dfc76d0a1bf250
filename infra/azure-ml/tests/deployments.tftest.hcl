# What is sent for endpoint, deployments and traffic.

mock_provider "azurerm" {
  mock_data "azurerm_client_config" {
    defaults = { tenant_id = "00000000-0000-0000-0000-000000000000", subscription_id = "00000000-0000-0000-0000-000000000000" }
  }
}
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

run "traffic_goes_where_it_is_sent" {
  command = plan
  variables {
    deployments = {
      blue  = { image_uri = "registry.example/remora@sha256:0000000000000000000000000000000000000000000000000000000000000000", traffic = 100 }
      green = { image_uri = "registry.example/remora@sha256:0000000000000000000000000000000000000000000000000000000000000000", mirror = 20, model_uri = "azureml://datastores/workspaceblobstore/paths/models-2" }
    }
  }
  assert {
    condition     = azapi_update_resource.traffic.body.properties.traffic == { blue = 100, green = 0 } && azapi_update_resource.traffic.body.properties.mirrorTraffic == { blue = 0, green = 20 }
    error_message = "a mirrored deployment gets copies and no share of the traffic"
  }
  assert {
    condition     = toset([for each in azapi_resource.model : each.body.properties.modelUri]) == toset(["azureml://datastores/workspaceblobstore/paths/models", "azureml://datastores/workspaceblobstore/paths/models-2"])
    error_message = "a deployment serves the models that it names"
  }
  assert {
    condition     = local.versions["blue"] != local.versions["green"]
    error_message = "a version cannot be changed, so that other models are another version"
  }
}

run "traffic_moves_by_a_zero_that_is_merged" {
  command = plan
  variables {
    deployments = {
      blue  = { image_uri = "registry.example/remora@sha256:0000000000000000000000000000000000000000000000000000000000000000", traffic = 0 }
      green = { image_uri = "registry.example/remora@sha256:0000000000000000000000000000000000000000000000000000000000000000", traffic = 100 }
    }
  }
  assert {
    condition     = merge({ blue = 100 }, azapi_update_resource.traffic.body.properties.traffic) == { blue = 0, green = 100 } && merge({ green = 20 }, azapi_update_resource.traffic.body.properties.mirrorTraffic) == { blue = 0, green = 0 }
    error_message = "azapi merges the body into what the endpoint has, and Azure wants shares that sum to 100"
  }
}

run "a_gpu_that_is_not_used_is_not_ready" {
  command = plan
  variables {
    deployments = { blue = { image_uri = "registry.example/remora@sha256:0000000000000000000000000000000000000000000000000000000000000000", gpu_image = true, instance_type = "Standard_NC4as_T4_v3", traffic = 100 } }
  }
  assert {
    condition     = azapi_resource.deployment["blue"].body.properties.environmentVariables.REMORA_REQUIRE_GPU == "true"
    error_message = "the processors would serve instead"
  }
}

run "measured_settings_take_the_place_of_the_defaults" {
  command = plan
  variables {
    deployments = { blue = { image_uri = "registry.example/remora@sha256:0000000000000000000000000000000000000000000000000000000000000000", traffic = 100, max_concurrent = 64, timeout_ms = 90000, load_seconds = 120 } }
  }
  assert {
    condition     = azapi_resource.deployment["blue"].body.properties.requestSettings == { requestTimeout = "PT90S", maxConcurrentRequestsPerInstance = 64 }
    error_message = "the request settings are those given"
  }
  assert {
    condition     = azapi_resource.deployment["blue"].body.properties.readinessProbe.failureThreshold == 24
    error_message = "readiness waits as long as the models load"
  }
}

run "liveness_and_readiness_are_two_routes" {
  command = plan
  assert {
    condition     = azapi_resource.environment["blue"].body.properties.inferenceConfig.livenessRoute.path != azapi_resource.environment["blue"].body.properties.inferenceConfig.readinessRoute.path
    error_message = "one route for both restarts a container that is still loading"
  }
}

run "one_instance_needs_no_rules" {
  command = plan
  variables {
    deployments = { blue = { image_uri = "registry.example/remora@sha256:0000000000000000000000000000000000000000000000000000000000000000", traffic = 100, instances = { min = 1, max = 1 } } }
  }
  assert {
    condition     = length(azurerm_monitor_autoscale_setting.deployment) == 0
    error_message = "no deployment can be scaled"
  }
}

run "a_workspace_that_is_there_is_used" {
  command = plan
  variables {
    workspace = "/subscriptions/0/resourceGroups/example/providers/Microsoft.MachineLearningServices/workspaces/theirs"
  }
  assert {
    condition     = length(azurerm_machine_learning_workspace.this) == 0 && azapi_resource.endpoint.parent_id == var.workspace
    error_message = "nothing is made beside the workspace named"
  }
}

run "several_instances_follow_the_load" {
  command = plan
  assert {
    condition     = azurerm_monitor_autoscale_setting.deployment["blue"].profile[0].capacity[0].minimum == 1 && azurerm_monitor_autoscale_setting.deployment["blue"].profile[0].capacity[0].maximum == 3
    error_message = "between the fewest and the most instances"
  }
  assert {
    condition     = { for each in azurerm_monitor_autoscale_setting.deployment["blue"].profile[0].rule : each.scale_action[0].direction => each.metric_trigger[0].threshold } == { Increase = 70, Decrease = 25 }
    error_message = "one rule adds instances, one takes them away"
  }
}

run "without_deployments_there_is_a_registry_to_push_the_first_image_to" {
  command = plan
  variables {
    deployments = {}
  }
  assert {
    condition     = length(azurerm_container_registry.this) == 1 && length(azapi_resource.deployment) == 0
    error_message = "an image is named by its digest, which it gets in the registry"
  }
}

run "gpus_are_watched_where_there_are_some" {
  command = plan
  variables {
    deployments = {
      blue  = { image_uri = "registry.example/remora@sha256:0000000000000000000000000000000000000000000000000000000000000000", traffic = 100 }
      green = { image_uri = "registry.example/remora@sha256:0000000000000000000000000000000000000000000000000000000000000000", gpu_image = true, instance_type = "Standard_NC4as_T4_v3" }
    }
  }
  assert {
    condition     = { for name, each in azurerm_monitor_autoscale_setting.deployment : name => each.profile[0].rule[0].metric_trigger[0].metric_name } == { blue = "CpuUtilizationPercentage", green = "GpuUtilizationPercentage" }
    error_message = "the processors of a GPU instance idle while its batches queue"
  }
}

run "the_printed_command_asks_at_a_route_that_takes_requests" {
  command = apply
  assert {
    condition     = strcontains(output.invoke, "/score'") && strcontains(output.invoke, "get-access-token") && !strcontains(output.invoke, "online-endpoint invoke")
    error_message = "the scoring route is /, which takes no POST"
  }
}

run "two_places_under_one_version" {
  command = plan
  variables {
    deployments = {
      blue  = { image_uri = "registry.example/remora@sha256:0000000000000000000000000000000000000000000000000000000000000000", traffic = 100, model_version = "1" }
      green = { image_uri = "registry.example/remora@sha256:0000000000000000000000000000000000000000000000000000000000000000", model_version = "1", model_uri = "azureml://datastores/workspaceblobstore/paths/models-2" }
    }
  }
  expect_failures = [azapi_resource.model]
}

run "requests_and_answers_are_captured" {
  command = plan
  variables {
    deployments = { blue = { image_uri = "registry.example/remora@sha256:0000000000000000000000000000000000000000000000000000000000000000", traffic = 100, capture_percent = 20 } }
  }
  assert {
    condition     = azapi_resource.deployment["blue"].body.properties.dataCollector.collections.request == { dataCollectionMode = "Enabled", samplingRate = 0.2 }
    error_message = "a fifth of the requests is captured"
  }
}

run "instances_follow_the_clock" {
  command = plan
  variables {
    schedule = { day = { days = ["Monday", "Friday"], begin = 7, end = 19, instances = 2, timezone = "W. Europe Standard Time" } }
  }
  assert {
    condition     = join(",", [for each in azurerm_monitor_autoscale_setting.deployment["blue"].profile : each.capacity[0].minimum]) == "1,2,1"
    error_message = "two instances by day, one otherwise"
  }
  assert {
    condition     = join(",", [for each in azurerm_monitor_autoscale_setting.deployment["blue"].profile : tolist(each.recurrence[0].hours)[0] if length(each.recurrence) > 0]) == "7,19"
    error_message = "the day begins and ends"
  }
  assert {
    condition     = alltrue([for each in azurerm_monitor_autoscale_setting.deployment["blue"].profile : length(each.rule) == 2])
    error_message = "instances follow the load at all times"
  }
}
