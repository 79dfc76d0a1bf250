variable "name" {
  description = "The endpoint's name, also its host's: unique in the region."
  type        = string
  validation {
    condition     = can(regex("^[A-Za-z][A-Za-z0-9-]{1,30}[A-Za-z0-9]$", var.name))
    error_message = "name: 3 to 32 letters, digits and hyphens, beginning with a letter and not ending with a hyphen."
  }
}

variable "resource_group_name" {
  description = "The resource group, which is there already."
  type        = string
}

variable "location" {
  description = "The region."
  type        = string
}

variable "workspace" {
  description = "The workspace to use: its full resource id. null makes one, with its storage account, key vault, registry and insights."
  type        = string
  default     = null
  validation {
    condition     = var.workspace == null || can(regex("^/subscriptions/.+/providers/Microsoft.MachineLearningServices/workspaces/[^/]+$", var.workspace))
    error_message = "workspace: expected /subscriptions/.../providers/Microsoft.MachineLearningServices/workspaces/NAME."
  }
}

variable "model_uri" {
  description = "Where the models are, for the deployments that do not name their own: azureml://datastores/NAME/paths/FOLDER, or https://ACCOUNT.blob.core.windows.net/CONTAINER/FOLDER."
  type        = string
  default     = null
  validation {
    condition     = var.model_uri == null || can(regex("^(azureml://|https://[a-z0-9]+\\.blob\\.core\\.windows\\.net/).+", var.model_uri))
    error_message = "model_uri: expected azureml://... or https://ACCOUNT.blob.core.windows.net/...; Azure ML mounts models from there alone."
  }
}

variable "deployments" {
  description = "Deployments by name: image (from containers/azureml, by digest), where its models are (model_uri of the module without it), instance type and count, share of traffic, and settings. Give measured values: remora explain and docs/costs.md. One with a share or a mirror is taken out in two applies: first with traffic = 0 and mirror = 0, then without it. With none ({}), what they need is made first: workspace, registry, endpoint."
  type = map(object({
    image_uri       = string
    gpu_image       = optional(bool, false)
    model_uri       = optional(string)
    model_version   = optional(string)
    instance_type   = optional(string, "Standard_F4s_v2")
    scale_metric    = optional(string)
    instances       = optional(object({ min = number, max = number }), { min = 1, max = 3 })
    traffic         = optional(number, 0)
    mirror          = optional(number, 0)
    environment     = optional(map(string), {})
    max_concurrent  = optional(number, 32)
    timeout_ms      = optional(number, 60000)
    load_seconds    = optional(number, 300)
    capture_percent = optional(number, 0)
  }))
  validation {
    condition     = alltrue([for name in keys(var.deployments) : can(regex("^[A-Za-z][A-Za-z0-9-]{1,30}[A-Za-z0-9]$", name))])
    error_message = "deployments: a name has 3 to 32 letters, digits and hyphens."
  }
  validation {
    condition     = alltrue([for each in values(var.deployments) : can(regex("@sha256:[0-9a-f]{64}$", each.image_uri))])
    error_message = "deployments: name the image by digest (...@sha256:...); a tag can move without the plan changing."
  }
  validation {
    condition     = alltrue([for each in values(var.deployments) : each.gpu_image || !can(regex("^Standard_N", each.instance_type))])
    error_message = "deployments: instances Standard_N... have GPUs, and an image without CUDA would leave them idle without an error. Build the image with the gpu extra and set gpu_image = true, or take an instance without GPUs."
  }
  validation {
    condition     = alltrue([for each in values(var.deployments) : can(regex("^(azureml://|https://[a-z0-9]+\\.blob\\.core\\.windows\\.net/).+", coalesce(each.model_uri, var.model_uri, "none")))])
    error_message = "deployments: model_uri, of the deployment or of the module, is azureml://... or https://ACCOUNT.blob.core.windows.net/..."
  }
  validation {
    condition     = alltrue([for each in values(var.deployments) : each.scale_metric == null ? true : contains(["CpuUtilizationPercentage", "CpuMemoryUtilizationPercentage", "GpuUtilizationPercentage", "GpuMemoryUtilizationPercentage"], each.scale_metric)])
    error_message = "deployments: scale_metric is CpuUtilizationPercentage, CpuMemoryUtilizationPercentage, GpuUtilizationPercentage or GpuMemoryUtilizationPercentage."
  }
  validation {
    # The 0 is for none at all: sum takes no empty list.
    condition     = contains([0, 100], sum(concat([0], [for each in values(var.deployments) : each.traffic])))
    error_message = "deployments: the shares of traffic add up to 100, or all are 0."
  }
  validation {
    condition     = length([for each in values(var.deployments) : each if each.mirror > 0]) <= 1 && alltrue([for each in values(var.deployments) : each.mirror >= 0 && each.mirror <= 50 && (each.mirror == 0 || each.traffic == 0)])
    error_message = "deployments: traffic is mirrored to one deployment at most, 50 percent at most, and to none that also gets live traffic."
  }
  validation {
    condition     = alltrue([for each in values(var.deployments) : each.timeout_ms >= 1 && each.timeout_ms <= 180000])
    error_message = "deployments: timeout_ms lies between 1 and 180000, Azure ML's most for a request."
  }
  validation {
    condition     = alltrue([for each in values(var.deployments) : each.max_concurrent >= 1])
    error_message = "deployments: max_concurrent is at least 1; with 1, Azure ML's default, no batch ever forms."
  }
  validation {
    condition     = alltrue([for each in values(var.deployments) : each.capture_percent >= 0 && each.capture_percent <= 100])
    error_message = "deployments: capture_percent, the share of requests and answers that go to the workspace's storage, lies between 0 and 100."
  }
  validation {
    condition     = alltrue([for each in values(var.deployments) : each.instances.min >= 1 && each.instances.max >= each.instances.min])
    error_message = "deployments: 1 <= instances.min <= instances.max; managed endpoints do not go down to none."
  }
}

variable "scale_at_percent" {
  description = "Load (of the GPUs where there are some, of the processors elsewhere) above which an instance is added, and below which one is taken away."
  type        = object({ out = number, in = number })
  default     = { out = 70, in = 25 }
  validation {
    condition     = var.scale_at_percent.in < var.scale_at_percent.out / 2
    error_message = "scale_at_percent: in must be less than half of out, or going from two instances to one brings the second back."
  }
}

variable "public_access" {
  description = "Whether the endpoint can be reached from outside the workspace's network."
  type        = bool
  default     = true
}

variable "tags" {
  description = "Tags of everything that can have them."
  type        = map(string)
  default     = {}
}

variable "schedule" {
  description = "More instances of every deployment by the clock: by name, the days and hours on which it begins and ends, the fewest instances in between, and the time zone by its Windows name. Deployments with one instance at most are left alone."
  type = map(object({
    days      = list(string)
    begin     = number
    end       = number
    instances = number
    timezone  = optional(string, "UTC")
  }))
  default = {}
  validation {
    condition     = alltrue([for each in values(var.schedule) : each.begin >= 0 && each.begin < each.end && each.end <= 23 && each.instances >= 1 && length(each.days) > 0])
    error_message = "schedule: hours 0 <= begin < end <= 23, at least one day (Monday, ...) and one instance."
  }
}
