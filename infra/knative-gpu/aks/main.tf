# GPU nodes for an AKS cluster: tainted, and none of them while no pod asks.

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
  node_labels           = { "remora.dev/pool" = var.name }
  # AKS taints spot nodes by itself as well.
  node_taints = ["nvidia.com/gpu=present:NoSchedule"]
  tags        = var.tags

  lifecycle {
    # The autoscaler owns the count.
    ignore_changes = [node_count]
  }
}
