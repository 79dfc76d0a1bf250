# Nine of ten requests go to the models that are known to work, one to new ones on a GPU, and copies to a third deployment.

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
      image_uri      = var.gpu_image_uri
      gpu_image      = true
      instance_type  = "Standard_NC4as_T4_v3"
      instances      = { min = 1, max = 2 }
      traffic        = 10
      model_uri      = "azureml://datastores/workspaceblobstore/paths/models/2"
      max_concurrent = 64
      load_seconds   = 120
    }
    shadow = { image_uri = var.image_uri, mirror = 10, model_uri = "azureml://datastores/workspaceblobstore/paths/models/2", instances = { min = 1, max = 1 } }
  }
  scale_at_percent = { out = 80, in = 30 }
  public_access    = true
  tags             = { team = "vision" }
}

output "invoke" {
  description = "A command that asks the endpoint."
  value       = module.remora.invoke
}
