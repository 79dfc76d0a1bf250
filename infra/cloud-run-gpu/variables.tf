variable "project_id" {
  description = "The project that everything is made in."
  type        = string
}

variable "region" {
  description = "A region in which Cloud Run offers the GPU."
  type        = string
}

variable "name" {
  description = "What the service and its account are called."
  type        = string
  default     = "remora"
  validation {
    condition     = can(regex("^[a-z]([a-z0-9-]{4,28}[a-z0-9])$", var.name))
    error_message = "name: 6 to 30 lower-case letters, digits and hyphens, as a service account's name must be."
  }
}

variable "model_uri" {
  description = "Where the models are: gs://BUCKET/FOLDER, a folder that holds a model repository. It is mounted, not downloaded."
  type        = string
  validation {
    condition     = can(regex("^gs://[a-z0-9][a-z0-9._-]+/[^/].*[^/]$", var.model_uri))
    error_message = "model_uri: expected gs://BUCKET/FOLDER without a slash at its end; Cloud Run mounts buckets of Cloud Storage alone."
  }
}

variable "image_uri" {
  description = "The image built from containers/gpu (or cpu, with gpu = null), by digest."
  type        = string
  validation {
    condition     = can(regex("@sha256:[0-9a-f]{64}$", var.image_uri))
    error_message = "image_uri: name the image by digest (...@sha256:...); a tag can move without the plan changing."
  }
}

variable "gpu" {
  description = "The GPU of each instance, such as nvidia-l4; null for none."
  type        = string
  default     = "nvidia-l4"
}

variable "resources" {
  description = "Processors and memory of each instance."
  type        = object({ cpu = number, memory_gib = number })
  default     = { cpu = 4, memory_gib = 16 }
  validation {
    condition     = contains([1, 2, 4, 6, 8], var.resources.cpu)
    error_message = "resources.cpu: 1, 2, 4, 6 or 8."
  }
  validation {
    condition     = var.gpu == null || (var.resources.cpu >= 4 && var.resources.memory_gib >= 16)
    error_message = "resources: an instance with a GPU has at least 4 processors and 16 GiB."
  }
}

variable "instances" {
  description = "The fewest and the most instances; min 0 lets the service go to sleep."
  type        = object({ min = number, max = number })
  default     = { min = 0, max = 3 }
  validation {
    condition     = var.instances.min >= 0 && var.instances.max >= max(1, var.instances.min)
    error_message = "instances: 0 <= min <= max, and max at least 1."
  }
}

variable "concurrency" {
  description = "Requests that an instance may hold at once. At least the largest batch times the instances of the model, or batches never fill."
  type        = number
  default     = 32
  validation {
    condition     = var.concurrency >= 1 && var.concurrency <= 1000
    error_message = "concurrency: Cloud Run takes 1 to 1000."
  }
}

variable "timeout_seconds" {
  description = "How long a request may take."
  type        = number
  default     = 300
  validation {
    condition     = var.timeout_seconds >= 1 && var.timeout_seconds <= 3600
    error_message = "timeout_seconds: Cloud Run takes 1 to 3600."
  }
}

variable "startup_seconds" {
  description = "How long an instance may take until its models are ready."
  type        = number
  default     = 240
  validation {
    condition     = var.startup_seconds >= 10 && var.startup_seconds <= 240
    error_message = "startup_seconds: Cloud Run waits 10 to 240."
  }
}

variable "invokers" {
  description = "Who may call the service, such as serviceAccount:app@project.iam.gserviceaccount.com."
  type        = list(string)
  default     = []
  validation {
    condition     = !contains(var.invokers, "allUsers") && !contains(var.invokers, "allAuthenticatedUsers")
    error_message = "invokers: remora does not tell callers apart; name those who may call, not everyone."
  }
}

variable "arguments" {
  description = "Further flags of `remora serve`."
  type        = list(string)
  default     = []
}
