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
  description = "The image cuda12 or cuda13 (or cpu, with gpu = null) of `remora image build`, by digest."
  type        = string
  validation {
    condition     = can(regex("@sha256:[0-9a-f]{64}$", var.image_uri))
    error_message = "image_uri: name the image by digest (...@sha256:...); a tag can move without the plan changing."
  }
}

variable "image_cuda" {
  description = "The major version of CUDA in the image: 12, 13, or null for none. Cloud Run chooses the driver, so that the GPU decides what it takes."
  type        = number
  default     = null
}

variable "gpu" {
  description = "The GPU of each instance, nvidia-l4 or nvidia-rtx-pro-6000; null for none."
  type        = string
  default     = null
  validation {
    condition     = var.gpu == null || var.image_cuda != null
    error_message = "gpu: an image without CUDA would leave the GPU idle without an error. Say by image_cuda which version of CUDA the image has."
  }
  validation {
    condition     = var.gpu == "nvidia-l4" ? try(var.image_cuda <= 12, true) : true
    error_message = "gpu: the driver of nvidia-l4 on Cloud Run (535) is too old for CUDA 13; take an image with CUDA 12, or nvidia-rtx-pro-6000."
  }
}

variable "resources" {
  description = "Processors and memory of each instance."
  type        = object({ cpu = number, memory_gib = number })
  default     = { cpu = 4, memory_gib = 16 }
  validation {
    condition     = contains([1, 2, 4, 6, 8, 20, 22, 24, 26, 28, 30], var.resources.cpu)
    error_message = "resources.cpu: 1, 2, 4, 6 or 8; 20 to 30, by twos, with nvidia-rtx-pro-6000."
  }
  validation {
    condition     = var.gpu == null || (var.resources.cpu >= 4 && var.resources.memory_gib >= 16)
    error_message = "resources: an instance with a GPU has at least 4 processors and 16 GiB."
  }
  validation {
    condition     = var.gpu != "nvidia-rtx-pro-6000" || (var.resources.cpu >= 20 && var.resources.memory_gib >= 80)
    error_message = "resources: an instance with nvidia-rtx-pro-6000 has at least 20 processors and 80 GiB."
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

variable "environment" {
  description = "Environment variables of the container. Not for secrets."
  type        = map(string)
  default     = {}
}

variable "secrets" {
  description = "Environment variables out of Secret Manager: name of the variable and of the secret, whose latest version is read. The output service_account needs the right to read them."
  type        = map(string)
  default     = {}
}

variable "ingress" {
  description = "Where requests may come from: INGRESS_TRAFFIC_ALL, INGRESS_TRAFFIC_INTERNAL_ONLY or INGRESS_TRAFFIC_INTERNAL_LOAD_BALANCER."
  type        = string
  default     = "INGRESS_TRAFFIC_ALL"
  validation {
    condition     = contains(["INGRESS_TRAFFIC_ALL", "INGRESS_TRAFFIC_INTERNAL_ONLY", "INGRESS_TRAFFIC_INTERNAL_LOAD_BALANCER"], var.ingress)
    error_message = "ingress: INGRESS_TRAFFIC_ALL, INGRESS_TRAFFIC_INTERNAL_ONLY or INGRESS_TRAFFIC_INTERNAL_LOAD_BALANCER."
  }
}

variable "encryption_key" {
  description = "The Cloud KMS key of the service (projects/.../cryptoKeys/NAME); null for Google's own."
  type        = string
  default     = null
}

variable "deletion_protection" {
  description = "Refuse to delete the service, by Terraform too."
  type        = bool
  default     = false
}

variable "labels" {
  description = "Labels of the service, by which costs can be told apart."
  type        = map(string)
  default     = {}
}

variable "service_account" {
  description = "The e-mail address of a service account that the service runs as, which is there already; null makes one. The module lets it read the bucket."
  type        = string
  default     = null
}

variable "network" {
  description = "A VPC network and subnetwork for the service's own requests (direct VPC egress), and which of them: PRIVATE_RANGES_ONLY or ALL_TRAFFIC. null for none."
  type        = object({ network = string, subnetwork = string, egress = optional(string, "PRIVATE_RANGES_ONLY") })
  default     = null
  validation {
    condition     = var.network == null ? true : contains(["PRIVATE_RANGES_ONLY", "ALL_TRAFFIC"], var.network.egress)
    error_message = "network.egress: PRIVATE_RANGES_ONLY or ALL_TRAFFIC."
  }
}
