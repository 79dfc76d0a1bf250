variable "cluster_id" {
  description = "The AKS cluster, which is there already, with NVIDIA's device plugin."
  type        = string
  validation {
    condition     = can(regex("/providers/Microsoft.ContainerService/managedClusters/[^/]+$", var.cluster_id))
    error_message = "cluster_id: expected /subscriptions/.../providers/Microsoft.ContainerService/managedClusters/NAME."
  }
}

variable "vm_size" {
  description = "The machine of each node, of an N family."
  type        = string
  default     = "Standard_NC4as_T4_v3"
  validation {
    condition     = can(regex("^Standard_N", var.vm_size))
    error_message = "vm_size: a size of an N family, such as Standard_NC4as_T4_v3; others have no GPU."
  }
}

variable "zones" {
  description = "Zones of the nodes; empty for none."
  type        = list(string)
  default     = []
}

variable "name" {
  description = "What the node pool is called."
  type        = string
  default     = "gpu"
  validation {
    condition     = can(regex("^[a-z][a-z0-9]{1,11}$", var.name)) && length(var.name) <= 12
    error_message = "name: 2 to 12 lower-case letters and digits."
  }
}

variable "nodes" {
  description = "The fewest and the most nodes; min 0 lets GPUs go when no pod asks for one."
  type        = object({ min = number, max = number })
  default     = { min = 0, max = 4 }
  validation {
    condition     = var.nodes.min >= 0 && var.nodes.max >= max(1, var.nodes.min)
    error_message = "nodes: 0 <= min <= max, and max at least 1."
  }
}

variable "spot" {
  description = "Nodes that the cloud may take back at short notice, for less money. remora finishes what is under way when a node is drained."
  type        = bool
  default     = false
}

variable "disk_gib" {
  description = "Disk of each node: images and models are unpacked on it."
  type        = number
  default     = 200
  validation {
    condition     = var.disk_gib >= 100
    error_message = "disk_gib: at least 100; a GPU image and two models fill less."
  }
}

variable "tags" {
  description = "Tags of everything that can have them."
  type        = map(string)
  default     = {}
}
