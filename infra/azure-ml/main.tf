# remora on a managed online endpoint. azurerm has no resource for endpoints and deployments: azapi sends the service's own
# bodies. tests/infra compares their keys with those that the service's client knows.

locals {
  api = "2024-10-01"

  # What the container tells the platform: where to ask and on which port. `/` lets clients append /v2/... themselves.
  routes = {
    liveness_route  = { path = "/v2/health/live", port = 5001 }
    readiness_route = { path = "/v2/health/ready", port = 5001 }
    scoring_route   = { path = "/", port = 5001 }
  }

  # A version of a model cannot be changed in Azure ML, so it is named after the place of its files.
  model_uris = { for name, each in var.deployments : name => coalesce(each.model_uri, var.model_uri) }
  versions   = { for name, each in var.deployments : name => each.model_version != null ? each.model_version : substr(sha256(local.model_uris[name]), 0, 12) }
}

resource "azapi_resource" "endpoint" {
  type      = "Microsoft.MachineLearningServices/workspaces/onlineEndpoints@${local.api}"
  name      = var.name
  parent_id = local.workspace_id
  location  = var.location
  tags      = var.tags

  identity {
    type = "SystemAssigned"
  }
  body = {
    kind = "Managed"
    properties = {
      # Callers send a token of their identity: there is no key to leak.
      authMode            = "AADToken"
      publicNetworkAccess = var.public_access ? "Enabled" : "Disabled"
    }
  }
  response_export_values = ["properties.scoringUri"]
  lifecycle {
    ignore_changes = [body.properties.traffic, body.properties.mirrorTraffic]
  }
}

resource "azapi_resource" "model" {
  for_each  = { for name, version in local.versions : version => local.model_uris[name]... }
  type      = "Microsoft.MachineLearningServices/workspaces/models/versions@${local.api}"
  name      = each.key
  parent_id = "${local.workspace_id}/models/${var.name}"
  body = {
    properties = {
      modelType = "custom_model"
      modelUri  = each.value[0]
    }
  }
  lifecycle {
    create_before_destroy = true
    precondition {
      condition     = length(distinct(each.value)) == 1
      error_message = "deployments: model_version ${each.key} is given to two places of models; leave it out, and each place has a separate version."
    }
  }
}

resource "azapi_resource" "environment" {
  for_each  = var.deployments
  type      = "Microsoft.MachineLearningServices/workspaces/environments/versions@${local.api}"
  name      = substr(split("@sha256:", each.value.image_uri)[1], 0, 12)
  parent_id = "${local.workspace_id}/environments/${var.name}-${each.key}"
  body = {
    properties = {
      image  = each.value.image_uri
      osType = "Linux"
      inferenceConfig = {
        livenessRoute  = local.routes.liveness_route
        readinessRoute = local.routes.readiness_route
        scoringRoute   = local.routes.scoring_route
      }
    }
  }
}

resource "azapi_resource" "deployment" {
  for_each  = var.deployments
  type      = "Microsoft.MachineLearningServices/workspaces/onlineEndpoints/deployments@${local.api}"
  name      = each.key
  parent_id = azapi_resource.endpoint.id
  location  = var.location
  tags      = var.tags

  body = {
    kind = "Managed"
    sku  = { name = "Default", capacity = each.value.instances.min }
    properties = {
      endpointComputeType = "Managed"
      environmentId       = azapi_resource.environment[each.key].id
      # On GPUs a server that cannot use one is not ready, instead of serving by the processors.
      environmentVariables = merge(can(regex("(?i)^standard_n", each.value.instance_type)) ? { REMORA_REQUIRE_GPU = "true" } : {}, each.value.environment)
      instanceType         = each.value.instance_type
      model                = azapi_resource.model[local.versions[each.key]].id
      modelMountPath       = "/models"
      appInsightsEnabled   = true
      # The names of these two collections are those of the payloads.
      dataCollector = each.value.capture_percent == 0 ? null : {
        collections = { for name in ["request", "response"] : name => {
          dataCollectionMode = "Enabled"
          samplingRate       = each.value.capture_percent / 100
        } }
      }
      scaleSettings = { scaleType = "Default" }
      requestSettings = {
        # Azure ML's defaults, 5 s and one request at a time, end long requests and keep batches from forming.
        requestTimeout                   = "PT${each.value.timeout_ms / 1000}S"
        maxConcurrentRequestsPerInstance = each.value.max_concurrent
      }
      # A model that loads slowly is not ready, but alive: two routes, and only readiness waits for the models.
      livenessProbe = {
        initialDelay     = "PT10S"
        period           = "PT10S"
        timeout          = "PT2S"
        successThreshold = 1
        failureThreshold = 30
      }
      readinessProbe = {
        initialDelay     = "PT2S"
        period           = "PT5S"
        timeout          = "PT2S"
        successThreshold = 1
        failureThreshold = ceil(each.value.load_seconds / 5)
      }
    }
  }
  lifecycle {
    # A deployment that is taken out goes after the change of traffic; without this it would go before.
    create_before_destroy = true
    # Autoscaling owns the count.
    ignore_changes = [body.sku.capacity]
  }
}

# Traffic is given when the deployments are there, and taken before they go. azapi reads the endpoint, merges this body
# into it and sends the whole: a share or a mirror ends by its 0, never by being left out.
resource "azapi_update_resource" "traffic" {
  type        = azapi_resource.endpoint.type
  resource_id = azapi_resource.endpoint.id
  body = {
    properties = {
      traffic       = { for name, each in var.deployments : name => each.traffic }
      mirrorTraffic = { for name, each in var.deployments : name => each.mirror }
    }
  }
  depends_on = [azapi_resource.deployment]
}
