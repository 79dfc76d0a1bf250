variable "project_id" {
  description = "The project that everything is made in."
  type        = string
}

variable "region" {
  description = "Where the endpoint is."
  type        = string
}

variable "name" {
  description = "What the endpoint, its account and the repository of images are called."
  type        = string
  default     = "remora"
  validation {
    condition     = can(regex("^[a-z]([a-z0-9-]{4,28}[a-z0-9])$", var.name))
    error_message = "name: 6 to 30 lower-case letters, digits and hyphens, as a service account's name must be."
  }
}

variable "model_uri" {
  description = "Where the models are: gs://BUCKET/FOLDER, a folder that holds a model repository."
  type        = string
  validation {
    condition     = can(regex("^gs://[a-z0-9][a-z0-9._-]+/[^/].*[^/]$", var.model_uri))
    error_message = "model_uri: expected gs://BUCKET/FOLDER without a slash at its end; Vertex AI takes models from Cloud Storage alone."
  }
}

variable "image_uri" {
  description = "The image cpu, cuda12 or cuda13 of `remora image build`, by digest."
  type        = string
  validation {
    condition     = can(regex("@sha256:[0-9a-f]{64}$", var.image_uri))
    error_message = "image_uri: name the image by digest (...@sha256:...); a tag can move without the plan changing."
  }
}

variable "gpu_image" {
  description = "Whether the image is cuda12 or cuda13 of `remora image build`. Accelerators are refused without it."
  type        = bool
  default     = false
}

variable "machine" {
  description = "The machine of each replica, and its GPU: accelerator null for none."
  type        = object({ type = string, accelerator = optional(string), accelerators = optional(number, 1) })
  default     = { type = "n1-standard-4" }
  validation {
    condition     = var.machine.accelerator == null || var.gpu_image
    error_message = "machine.accelerator: an image without CUDA would leave the GPU idle without an error. Name the image cuda12 or cuda13 of `remora image build` and set gpu_image = true, or take a machine without accelerator."
  }
  validation {
    condition     = var.machine.accelerator == null ? true : can(regex("^NVIDIA_[A-Z0-9_]+$", var.machine.accelerator)) && var.machine.accelerators >= 1
    error_message = "machine.accelerator: expected a name such as NVIDIA_L4, and at least one of it."
  }
}

variable "replicas" {
  description = "The fewest and the most replicas. Vertex AI keeps at least one."
  type        = object({ min = number, max = number })
  default     = { min = 1, max = 3 }
  validation {
    condition     = var.replicas.min >= 1 && var.replicas.max >= var.replicas.min
    error_message = "replicas: 1 <= min <= max; for none at all take cloud-run-gpu."
  }
}

variable "dedicated" {
  description = "A dedicated endpoint name: larger requests, and no neighbours."
  type        = bool
  default     = true
}

variable "labels" {
  description = "Labels of endpoint and repository, by which costs can be told apart."
  type        = map(string)
  default     = {}
}

variable "service_account" {
  description = "The e-mail address of a service account that the replicas run as, which is there already; null makes one. The module lets it read the bucket."
  type        = string
  default     = null
}

variable "encryption_key" {
  description = "The Cloud KMS key of endpoint and repository (projects/.../cryptoKeys/NAME); null for Google's own."
  type        = string
  default     = null
}

variable "capture" {
  description = "Where requests and answers are captured (bq://PROJECT.DATASET.TABLE), and which share of them; null for none."
  type        = object({ table = string, percent = optional(number, 100) })
  default     = null
  validation {
    condition     = var.capture == null ? true : can(regex("^bq://[^.]+\\.[^.]+\\.[^.]+$", var.capture.table)) && var.capture.percent > 0 && var.capture.percent <= 100
    error_message = "capture: table is bq://PROJECT.DATASET.TABLE, and percent lies above 0 and up to 100."
  }
}
