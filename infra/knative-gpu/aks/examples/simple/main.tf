# Up to four T4 nodes, none while idle.

terraform {
  required_version = ">= 1.9"
  required_providers {
    azurerm = {
      source  = "hashicorp/azurerm"
      version = "~> 4.55"
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

variable "cluster_id" {
  description = "The cluster's resource id."
  type        = string
  default     = "/subscriptions/00000000-0000-0000-0000-000000000000/resourceGroups/example/providers/Microsoft.ContainerService/managedClusters/example"
}

module "gpu" {
  source     = "../.."
  cluster_id = var.cluster_id
}
