# A workspace with what it cannot be without; nothing of it is made when one is named.

data "azurerm_client_config" "current" {}

locals {
  own    = var.workspace == null ? 1 : 0
  short  = substr(lower(replace(var.name, "-", "")), 0, 14)
  unique = substr(sha256("${data.azurerm_client_config.current.subscription_id}${var.resource_group_name}${var.name}"), 0, 8)
}

resource "azurerm_storage_account" "this" {
  count                           = local.own
  name                            = "${local.short}${local.unique}"
  resource_group_name             = var.resource_group_name
  location                        = var.location
  account_tier                    = "Standard"
  account_replication_type        = "LRS"
  min_tls_version                 = "TLS1_2"
  allow_nested_items_to_be_public = false
  tags                            = var.tags
}

resource "azurerm_key_vault" "this" {
  count                      = local.own
  name                       = "${local.short}${local.unique}"
  resource_group_name        = var.resource_group_name
  location                   = var.location
  tenant_id                  = data.azurerm_client_config.current.tenant_id
  sku_name                   = "standard"
  purge_protection_enabled   = true
  soft_delete_retention_days = 7
  tags                       = var.tags
}

resource "azurerm_container_registry" "this" {
  count               = local.own
  name                = "${local.short}${local.unique}"
  resource_group_name = var.resource_group_name
  location            = var.location
  sku                 = "Standard"
  admin_enabled       = false
  tags                = var.tags
}

resource "azurerm_application_insights" "this" {
  count               = local.own
  name                = var.name
  resource_group_name = var.resource_group_name
  location            = var.location
  application_type    = "web"
  tags                = var.tags
}

resource "azurerm_machine_learning_workspace" "this" {
  count                         = local.own
  name                          = var.name
  resource_group_name           = var.resource_group_name
  location                      = var.location
  storage_account_id            = azurerm_storage_account.this[0].id
  key_vault_id                  = azurerm_key_vault.this[0].id
  container_registry_id         = azurerm_container_registry.this[0].id
  application_insights_id       = azurerm_application_insights.this[0].id
  public_network_access_enabled = var.public_access
  tags                          = var.tags

  identity {
    type = "SystemAssigned"
  }
}

locals {
  workspace_id = var.workspace == null ? azurerm_machine_learning_workspace.this[0].id : var.workspace
}
