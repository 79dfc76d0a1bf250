variable "project_id" {
  description = "The project of the cluster."
  type        = string
}

variable "cluster_name" {
  description = "The GKE cluster (standard mode), which is there already."
  type        = string
}

variable "location" {
  description = "The cluster's zone or region."
  type        = string
}

variable "node_zones" {
  description = "Zones of the nodes, where the GPU is offered; empty for the cluster's own."
  type        = list(string)
  default     = []
}

variable "machine_type" {
  description = "The machine of each node."
  type        = string
  default     = "g2-standard-8"
}

variable "gpu" {
  description = "The GPU of each node, and how many."
  type        = object({ type = string, count = number })
  default     = { type = "nvidia-l4", count = 1 }
  validation {
    condition     = startswith(var.gpu.type, "nvidia-") && contains([1, 2, 4, 8], var.gpu.count)
    error_message = "gpu: a type such as nvidia-l4, and 1, 2, 4 or 8 of it."
  }
}

variable "name" {
  description = "What the node pool is called."
  type        = string
  default     = "gpu"
  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{0,38}[a-z0-9]$", var.name)) && length(var.name) <= 39
    error_message = "name: 2 to 39 lower-case letters, digits and hyphens."
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

variable "service_account" {
  description = "The e-mail address of the nodes' service account, which is there already with the roles for logs, metrics and images; null makes one."
  type        = string
  default     = null
}

variable "labels" {
  description = "Labels of the machines, by which costs can be told apart."
  type        = map(string)
  default     = {}
}
