# GPU nodes for an AKS cluster: tainted, and none of them while no pod asks.

locals {
  # AKS puts both on spot nodes by itself. Said here as well, or the next change of the pool takes them away.
  spot_labels = var.spot ? { "kubernetes.azure.com/scalesetpriority" = "spot" } : {}
  spot_taints = [for key, value in local.spot_labels : "${key}=${value}:NoSchedule"]
}

resource "azurerm_kubernetes_cluster_node_pool" "this" {
  name                  = var.name
  kubernetes_cluster_id = var.cluster_id
  vm_size               = var.vm_size
  mode                  = "User"
  os_disk_size_gb       = var.disk_gib
  zones                 = length(var.zones) > 0 ? var.zones : null
  auto_scaling_enabled  = true
  min_count             = var.nodes.min
  max_count             = var.nodes.max
  priority              = var.spot ? "Spot" : "Regular"
  eviction_policy       = var.spot ? "Delete" : null
  spot_max_price        = var.spot ? -1 : null
  node_labels           = merge({ "remora.dev/pool" = var.name }, local.spot_labels)
  node_taints           = concat(["nvidia.com/gpu=present:NoSchedule"], local.spot_taints)
  tags                  = var.tags

  lifecycle {
    # The autoscaler owns the count.
    ignore_changes = [node_count]
  }
}
