# One deployment on processors, with all traffic. Applied without an image first, it makes workspace and registry.

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

variable "model_uri" {
  description = "Where the models are."
  type        = string
  default     = "azureml://datastores/workspaceblobstore/paths/models"
}

variable "image_uri" {
  description = "The image built from containers/azureml, by digest; null makes what the push of the image needs."
  type        = string
  default     = null
}

module "remora" {
  source              = "../.."
  name                = var.name
  resource_group_name = var.resource_group_name
  location            = var.location
  model_uri           = var.model_uri
  deployments         = var.image_uri == null ? {} : { blue = { image_uri = var.image_uri, traffic = 100 } }
}

output "registry" {
  description = "The registry to push the image to."
  value       = module.remora.registry
}

output "invoke" {
  description = "A command that asks the endpoint."
  value       = module.remora.invoke
}
