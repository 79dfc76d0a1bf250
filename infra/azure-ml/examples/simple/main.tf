# Nine of ten requests go to the deployment that is known to work, one to the new one.

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
  features {}
}

variable "image_uri" {
  description = "The image built from containers/azureml, by digest."
  type        = string
}

module "remora" {
  source              = "../.."
  name                = "remora-example"
  resource_group_name = "example"
  location            = "westeurope"
  model_uri           = "azureml://datastores/workspaceblobstore/paths/models"
  deployments = {
    blue  = { image_uri = var.image_uri, traffic = 90 }
    green = { image_uri = var.image_uri, traffic = 10, model_version = "2", instances = { min = 1, max = 1 } }
  }
}

output "invoke" {
  description = "A command that asks the endpoint."
  value       = module.remora.invoke
}
