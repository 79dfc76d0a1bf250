# A cluster with up to two T4 nodes and an identity that reads the models, up to the first answer.

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

variable "name" {
  description = "What the cluster and all around it are called."
  type        = string
  default     = "remora"
}

variable "image_repository" {
  description = "The repository of the image cuda13 of `remora image build`, without tag."
  type        = string
}

variable "image_tag" {
  description = "The tag of the image."
  type        = string
  default     = "cuda13"
}

variable "location" {
  description = "The region."
  type        = string
  default     = "westeurope"
}

variable "storage_account_id" {
  description = "The resource id of the storage account with the model repository, in the folder models of the container ml."
  type        = string
  default     = "/subscriptions/00000000-0000-0000-0000-000000000000/resourceGroups/example/providers/Microsoft.Storage/storageAccounts/example"
}

variable "registry_id" {
  description = "The resource id of the registry with the image."
  type        = string
  default     = "/subscriptions/00000000-0000-0000-0000-000000000000/resourceGroups/example/providers/Microsoft.ContainerRegistry/registries/example"
}

locals {
  storage = element(split("/", var.storage_account_id), 8)
  tags    = { application = var.name }
}

resource "azurerm_resource_group" "this" {
  name     = var.name
  location = var.location
  tags     = local.tags
}

resource "azurerm_kubernetes_cluster" "this" {
  name                      = var.name
  resource_group_name       = azurerm_resource_group.this.name
  location                  = var.location
  dns_prefix                = var.name
  oidc_issuer_enabled       = true
  workload_identity_enabled = true
  tags                      = local.tags

  default_node_pool {
    name       = "system"
    vm_size    = "Standard_D4s_v5"
    node_count = 2
  }
  identity {
    type = "SystemAssigned"
  }
  # It enforces NetworkPolicy.
  network_profile {
    network_plugin      = "azure"
    network_plugin_mode = "overlay"
    network_data_plane  = "cilium"
    network_policy      = "cilium"
  }
}

# The cluster's autoscaler takes the nodes away and brings them back.
module "gpu" {
  source     = "../.."
  cluster_id = azurerm_kubernetes_cluster.this.id
  nodes      = { min = 0, max = 2 }
  tags       = local.tags
}

resource "azurerm_role_assignment" "pull" {
  scope                            = var.registry_id
  role_definition_name             = "AcrPull"
  principal_id                     = join("", azurerm_kubernetes_cluster.this.kubelet_identity[*].object_id)
  skip_service_principal_aad_check = true
}

resource "azurerm_user_assigned_identity" "reader" {
  name                = "${var.name}-reader"
  resource_group_name = azurerm_resource_group.this.name
  location            = var.location
  tags                = local.tags
}

resource "azurerm_role_assignment" "reader" {
  scope                = var.storage_account_id
  role_definition_name = "Storage Blob Data Reader"
  principal_id         = azurerm_user_assigned_identity.reader.principal_id
}

resource "azurerm_federated_identity_credential" "reader" {
  name                = "remora"
  resource_group_name = azurerm_resource_group.this.name
  parent_id           = azurerm_user_assigned_identity.reader.id
  issuer              = azurerm_kubernetes_cluster.this.oidc_issuer_url
  subject             = "system:serviceaccount:default:remora"
  audience            = ["api://AzureADTokenExchange"]
}

output "next" {
  description = "The commands that are left, from the root of the repository: the last one asks the model."
  value = [
    "az aks get-credentials --name ${azurerm_kubernetes_cluster.this.name} --resource-group ${azurerm_resource_group.this.name}",
    "infra/knative-gpu/install.sh",
    "helm install remora infra/helm/remora --set gpu.count=1 --set replicas=1 --set image.repository=${var.image_repository} --set image.tag=${var.image_tag} --set models.uri=as://${local.storage}/ml/models --set-string 'serviceAccount.annotations.azure\\.workload\\.identity/client-id=${azurerm_user_assigned_identity.reader.client_id}' --set-string 'podLabels.azure\\.workload\\.identity/use=true' --wait --timeout=20m",
    "kubectl port-forward service/remora 8000:8000 &",
    "curl localhost:8000/v2/models/digits/infer --json @request.json",
  ]
  depends_on = [module.gpu, azurerm_role_assignment.pull, azurerm_role_assignment.reader, azurerm_federated_identity_credential.reader]
}
