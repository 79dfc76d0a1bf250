variable "cluster_name" {
  description = "The EKS cluster, which is there already, with the cluster autoscaler and NVIDIA's device plugin."
  type        = string
}

variable "subnet_ids" {
  description = "Subnets of the nodes."
  type        = list(string)
  validation {
    condition     = length(var.subnet_ids) > 0
    error_message = "subnet_ids: at least one."
  }
}

variable "instance_types" {
  description = "Instance types of the nodes, all with the same number of GPUs."
  type        = list(string)
  default     = ["g5.xlarge"]
  validation {
    condition     = length(var.instance_types) > 0 && alltrue([for each in var.instance_types : can(regex("^(g|p)[0-9][a-z]*\\.", each))])
    error_message = "instance_types: GPU types of the g and p families, such as g5.xlarge."
  }
}

variable "name" {
  description = "What the node pool is called."
  type        = string
  default     = "gpu"
  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{0,38}[a-z0-9]$", var.name)) && length(var.name) <= 40
    error_message = "name: 2 to 40 lower-case letters, digits and hyphens."
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

variable "role_arn" {
  description = "A role of the nodes, which is there already with EKS's policies for nodes; null makes one."
  type        = string
  default     = null
}

variable "permissions_boundary_arn" {
  description = "The permissions boundary of the role made here; null for none."
  type        = string
  default     = null
}
