# Nine of ten requests go to the models that are known to work, one to new ones on a GPU, and copies to a third deployment; more instances by day, and a budget.

terraform {
  required_version = ">= 1.9"
  required_providers {
    azurerm = {
      source  = "hashicorp/azurerm"
      version = "~> 4.55"
    }
    azapi = {
      source  = "azure/azapi"
      version = "~> 2.4"
    }
  }
}

provider "azurerm" {
  subscription_id = var.subscription_id
  features {}
}

variable "subscription_id" {
  description = "The subscription; null for that of ARM_SUBSCRIPTION_ID."
  type        = string
  default     = null
}

variable "resource_group_name" {
  description = "The resource group, which is there already."
  type        = string
  default     = "example"
}

variable "location" {
  description = "The region."
  type        = string
  default     = "westeurope"
}

variable "name" {
  description = "The endpoint's name: unique in the region."
  type        = string
  default     = "remora-example"
}

variable "image_uri" {
  description = "The image built from containers/azureml, by digest."
  type        = string
}

variable "gpu_image_uri" {
  description = "The same, built with the gpu extra."
  type        = string
}

module "remora" {
  source              = "../.."
  name                = var.name
  resource_group_name = var.resource_group_name
  location            = var.location
  deployments = {
    blue = { image_uri = var.image_uri, traffic = 90, model_uri = "azureml://datastores/workspaceblobstore/paths/models/1" }
    green = {
      image_uri       = var.gpu_image_uri
      gpu_image       = true
      instance_type   = "Standard_NC4as_T4_v3"
      instances       = { min = 1, max = 2 }
      traffic         = 10
      model_uri       = "azureml://datastores/workspaceblobstore/paths/models/2"
      max_concurrent  = 64
      load_seconds    = 120
      capture_percent = 10
    }
    shadow = { image_uri = var.image_uri, mirror = 10, model_uri = "azureml://datastores/workspaceblobstore/paths/models/2", instances = { min = 1, max = 1 } }
  }
  schedule         = { day = { days = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday"], begin = 7, end = 19, instances = 2 } }
  scale_at_percent = { out = 80, in = 30 }
  public_access    = true
  tags             = { team = "vision" }
}

data "azurerm_resource_group" "this" {
  name = var.resource_group_name
}

# By the month, and by the tag.
resource "azurerm_consumption_budget_resource_group" "team" {
  name              = "remora-complete"
  resource_group_id = data.azurerm_resource_group.this.id
  amount            = 500
  time_grain        = "Monthly"

  time_period {
    start_date = "2026-01-01T00:00:00Z"
  }
  filter {
    tag {
      name   = "team"
      values = ["vision"]
    }
  }
  notification {
    threshold      = 80
    threshold_type = "Forecasted"
    operator       = "GreaterThan"
    contact_emails = ["on-call@example.com"]
  }
}

output "invoke" {
  description = "A command that asks the endpoint."
  value       = module.remora.invoke
}
