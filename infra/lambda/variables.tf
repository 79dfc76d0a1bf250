variable "name" {
  description = "What the function, its role and its log group are called."
  type        = string
  validation {
    condition     = can(regex("^[a-zA-Z0-9-_]{1,50}$", var.name))
    error_message = "name: up to 50 letters, digits, hyphens and underscores."
  }
}

variable "image_uri" {
  description = "An image in ECR made from containers/lambda, by digest."
  type        = string
  validation {
    condition     = can(regex("@sha256:[0-9a-f]{64}$", var.image_uri))
    error_message = "image_uri: name the image by digest (...@sha256:...); a tag can move without the plan changing."
  }
}

variable "model_uri" {
  description = "Where the models are: s3://BUCKET/PREFIX/, or null when the image holds them (in /var/task/models or /opt/models)."
  type        = string
  default     = null
  validation {
    condition     = var.model_uri == null || can(regex("^s3://[a-z0-9][a-z0-9.-]+[a-z0-9]/(.+/)?$", var.model_uri))
    error_message = "model_uri: expected s3://BUCKET/PREFIX/ with a slash at its end, or null for models in the image."
  }
}

variable "memory_mb" {
  description = "Memory; processors come with it, one for each 1769 MB."
  type        = number
  default     = 3538
  validation {
    condition     = var.memory_mb >= 512 && var.memory_mb <= 10240
    error_message = "memory_mb: 512 to 10240; below 512 the runtimes do not load."
  }
}

variable "timeout_seconds" {
  description = "How long an event may take."
  type        = number
  default     = 30
  validation {
    condition     = var.timeout_seconds >= 1 && var.timeout_seconds <= 900
    error_message = "timeout_seconds: Lambda takes 1 to 900."
  }
}

variable "scratch_mb" {
  description = "Size of /tmp, where models from S3 go."
  type        = number
  default     = 512
  validation {
    condition     = var.scratch_mb >= 512 && var.scratch_mb <= 10240
    error_message = "scratch_mb: Lambda takes 512 to 10240."
  }
}

variable "architecture" {
  description = "What the image was built for."
  type        = string
  default     = "x86_64"
  validation {
    condition     = contains(["x86_64", "arm64"], var.architecture)
    error_message = "architecture: x86_64 or arm64."
  }
}

variable "environment" {
  description = "Environment variables of the function. Not for secrets."
  type        = map(string)
  default     = {}
}

variable "kept_warm" {
  description = "Environments that are always ready; 0 for none."
  type        = number
  default     = 0
  validation {
    condition     = var.kept_warm >= 0
    error_message = "kept_warm: not negative."
  }
}

variable "max_concurrency" {
  description = "The most events at once; -1 leaves it to the account's limit."
  type        = number
  default     = -1
  validation {
    condition     = var.max_concurrency == -1 || var.max_concurrency >= max(1, var.kept_warm)
    error_message = "max_concurrency: -1, or at least 1 and at least kept_warm."
  }
}

variable "function_url" {
  description = "Give the function an address that callers sign for (AWS_IAM)."
  type        = bool
  default     = true
}

variable "log_days" {
  description = "How long logs are kept."
  type        = number
  default     = 30
}

variable "tags" {
  description = "Tags of everything that can have them."
  type        = map(string)
  default     = {}
}

variable "tracing" {
  description = "Sample events by X-Ray: the server's own spans hang below the segments."
  type        = bool
  default     = false
}

variable "role_arn" {
  description = "A role that the function runs as, which is there already; null makes one with the least rights."
  type        = string
  default     = null
}

variable "permissions_boundary_arn" {
  description = "The permissions boundary of the role made here; null for none."
  type        = string
  default     = null
}

variable "subnet_ids" {
  description = "Subnets of the function; empty for none. With them, the S3 endpoint of the VPC is the caller's to make."
  type        = list(string)
  default     = []
}

variable "security_group_ids" {
  description = "Security groups of the function; needed with subnet_ids."
  type        = list(string)
  default     = []
  validation {
    condition     = (length(var.security_group_ids) > 0) == (length(var.subnet_ids) > 0)
    error_message = "security_group_ids and subnet_ids belong together: give both or none."
  }
}

variable "kms_key_arn" {
  description = "The key of the environment variables and of encrypted models; null for the services' own."
  type        = string
  default     = null
}
