# The pool goes down to nothing and comes back.

mock_provider "azurerm" {}

variables {
  cluster_id = "/subscriptions/0/resourceGroups/example/providers/Microsoft.ContainerService/managedClusters/example"
}

run "nothing_but_gpu_work_lands_there" {
  command = plan
  assert {
    condition     = contains(azurerm_kubernetes_cluster_node_pool.this.node_taints, "nvidia.com/gpu=present:NoSchedule")
    error_message = "the nodes are tainted"
  }
  assert {
    condition     = azurerm_kubernetes_cluster_node_pool.this.min_count == 0 && azurerm_kubernetes_cluster_node_pool.this.eviction_policy == null
    error_message = "no node while no pod asks, and none that is taken back unasked"
  }
  assert {
    condition     = length(azurerm_kubernetes_cluster_node_pool.this.node_taints) == 1 && output.spot_toleration == null
    error_message = "regular nodes have nothing of spot ones"
  }
}

run "spot_nodes_may_be_taken_back" {
  command = plan
  variables {
    spot = true
  }
  assert {
    condition     = azurerm_kubernetes_cluster_node_pool.this.priority == "Spot" && azurerm_kubernetes_cluster_node_pool.this.spot_max_price == -1
    error_message = "at most the price of a regular node"
  }
  assert {
    condition     = contains(azurerm_kubernetes_cluster_node_pool.this.node_taints, "kubernetes.azure.com/scalesetpriority=spot:NoSchedule") && azurerm_kubernetes_cluster_node_pool.this.node_labels["kubernetes.azure.com/scalesetpriority"] == "spot"
    error_message = "what AKS puts on spot nodes is kept when the pool changes"
  }
  assert {
    condition     = output.spot_toleration.value == "spot" && length(azurerm_kubernetes_cluster_node_pool.this.node_taints) == 2
    error_message = "pods learn what else to tolerate"
  }
}

run "simple" {
  command = plan
  module {
    source = "./examples/simple"
  }
}

run "cluster" {
  command = plan
  variables {
    image_repository = "example.azurecr.io/remora"
  }
  module {
    source = "./examples/cluster"
  }
}
