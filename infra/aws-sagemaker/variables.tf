variable "name" {
  description = "What everything here is called: endpoint, model, role, alarms."
  type        = string
  validation {
    condition     = can(regex("^[a-zA-Z0-9](-?[a-zA-Z0-9]){0,39}$", var.name))
    error_message = "name: up to 40 letters, digits and single hyphens, as SageMaker's names are made of."
  }
}

variable "model_uri" {
  description = "Where the models are: an S3 prefix that holds a model repository (s3://bucket/models/), or one archive of it (s3://bucket/models.tar.gz)."
  type        = string
  validation {
    condition     = can(regex("^s3://[a-z0-9][a-z0-9.-]+[a-z0-9]/.+$", var.model_uri))
    error_message = "model_uri: expected s3://BUCKET/PREFIX/ or s3://BUCKET/KEY.tar.gz; SageMaker reads models from S3 alone."
  }
  validation {
    condition     = endswith(var.model_uri, ".tar.gz") || endswith(var.model_uri, "/")
    error_message = "model_uri: a prefix ends with a slash, so that models/ does not also take models-old/; an archive ends with .tar.gz."
  }
}

variable "image_uri" {
  description = "The image built from containers/sagemaker, by digest."
  type        = string
  validation {
    condition     = can(regex("@sha256:[0-9a-f]{64}$", var.image_uri))
    error_message = "image_uri: name the image by digest (...@sha256:...); a tag can move without the plan changing."
  }
}

variable "previous" {
  description = "Earlier releases to keep beside the current one, the latest first: their models and configurations stay, so that an endpoint that is rolled back can still scale, and going back takes no new upload. The output `releases` is the value for the next apply."
  type = list(object({
    image_uri   = string
    model_uri   = string
    environment = optional(map(string), {})
  }))
  default = []
  validation {
    condition     = alltrue([for each in var.previous : can(regex("@sha256:[0-9a-f]{64}$", each.image_uri)) && can(regex("^s3://[^/]+/.+(/|\\.tar\\.gz)$", each.model_uri))])
    error_message = "previous: each release has an image by digest and a model_uri as the current one has."
  }
  validation {
    condition     = length(var.previous) == 0 || var.models_path == null
    error_message = "previous: with models_path the files of earlier releases are deleted, so that they cannot be kept; upload models by other means."
  }
}

variable "mode" {
  description = "realtime: instances that are always there. async: requests and answers through S3, instances down to 0. serverless: no instances, processors only. scale-to-zero: real-time through inference components, instances down to 0. multi-model: real-time, the archives (MODEL.tar.gz) below model_uri are loaded when a request names one."
  type        = string
  default     = "realtime"
  validation {
    condition     = contains(["realtime", "async", "serverless", "scale-to-zero", "multi-model"], var.mode)
    error_message = "mode: one of realtime, async, serverless, scale-to-zero, multi-model."
  }
  validation {
    condition     = var.mode != "serverless" || endswith(var.model_uri, ".tar.gz")
    error_message = "mode: serverless takes one archive as model_uri (tar -czf models.tar.gz -C models .), not a prefix."
  }
  validation {
    condition     = var.mode != "multi-model" || !endswith(var.model_uri, ".tar.gz")
    error_message = "mode: multi-model takes the prefix of the archives as model_uri, not one archive."
  }
}

variable "instance_type" {
  description = "The instance type, such as ml.c7i.xlarge, or ml.g5.xlarge with gpu_image = true; serverless has none."
  type        = string
  default     = "ml.c7i.xlarge"
  validation {
    condition     = can(regex("^ml\\.[a-z0-9-]+\\.[a-z0-9]+$", var.instance_type))
    error_message = "instance_type: expected ml.FAMILY.SIZE, such as ml.g5.xlarge."
  }
  validation {
    condition     = var.mode == "serverless" || var.gpu_image || !contains(var.gpu_families, try(split(".", var.instance_type)[1], ""))
    error_message = "instance_type: this one has GPUs, and an image without CUDA would leave them idle without an error. Build the image with the gpu extra and set gpu_image = true, or take an instance without GPUs."
  }
  validation {
    condition     = var.mode != "multi-model" || !contains(var.gpu_families, try(split(".", var.instance_type)[1], ""))
    error_message = "instance_type: on GPUs SageMaker accepts only Triton's own container for multi-model; take an instance without GPUs, or scale-to-zero with components."
  }
}

variable "gpu_image" {
  description = "Whether the image was built with the gpu extra (CUDA). Instances with GPUs are refused without it."
  type        = bool
  default     = false
}

variable "inference_ami_version" {
  description = "The AMI of the instances, which brings the driver. null: on GPU instances the one with driver 580 and CUDA 13, which the wheels of the gpu extra need; elsewhere SageMaker's default."
  type        = string
  default     = null
}

variable "gpu_families" {
  description = "Instance families that have NVIDIA GPUs, to choose the AMI and the accelerators of an inference component."
  type        = list(string)
  default     = ["g4dn", "g5", "g6", "g6e", "g7e", "gr6", "p4d", "p4de", "p5", "p5e", "p5en", "p6-b200", "p6-b300", "p6e-gb200"]
}

variable "environment" {
  description = "Environment variables of the container, such as SAGEMAKER_TRITON_DEFAULT_MODEL_NAME. Not for secrets: they can be read by who may describe the model."
  type        = map(string)
  default     = {}
  validation {
    condition     = length(var.environment) <= 100
    error_message = "environment: SageMaker takes 100 variables at most."
  }
}

variable "capacity" {
  description = "The fewest and the most instances (copies of the model for scale-to-zero). min may be 0 for async and scale-to-zero. initial is how many a new release starts with, min without it: give the number that runs now, or a rollout under load begins with too few."
  type        = object({ min = number, max = number, initial = optional(number) })
  default     = { min = 1, max = 4 }
  validation {
    condition     = var.capacity.min >= 0 && var.capacity.max >= 1 && var.capacity.min <= var.capacity.max
    error_message = "capacity: 0 <= min <= max, and max at least 1."
  }
  validation {
    condition     = var.capacity.initial == null ? true : var.capacity.initial >= max(1, var.capacity.min) && var.capacity.initial <= var.capacity.max
    error_message = "capacity.initial: at least 1, and from min to max."
  }
  validation {
    condition     = var.capacity.min > 0 || contains(["async", "scale-to-zero", "serverless"], var.mode)
    error_message = "capacity.min = 0 needs mode async or scale-to-zero: a real-time variant keeps at least one instance."
  }
}

variable "target_concurrency" {
  description = "Requests under way in each instance or copy that scaling aims at. About 0.7 of the largest batch times the instances of the model: docs/infrastructure.md."
  type        = number
  default     = 8
  validation {
    condition     = var.target_concurrency > 0
    error_message = "target_concurrency: above 0."
  }
}

variable "cooldown_seconds" {
  description = "How long scaling waits after it added (out) or removed (in) capacity."
  type        = object({ in = number, out = number })
  default     = { in = 300, out = 60 }
}

variable "startup_timeout_seconds" {
  description = "How long the container may take until /ping answers, and the models until they are downloaded."
  type        = object({ health_check = number, download = number })
  default     = { health_check = 600, download = 900 }
  validation {
    condition     = alltrue([for seconds in values(var.startup_timeout_seconds) : seconds >= 60 && seconds <= 3600])
    error_message = "startup_timeout_seconds: SageMaker takes 60 to 3600."
  }
}

variable "async" {
  description = "For mode async: where requests are read and answers written, how many requests an instance takes at once, how many may wait for each instance, and the topics that are notified."
  type = object({
    input_uri               = string
    output_uri              = string
    target_backlog          = optional(number, 5)
    max_concurrent_requests = optional(number, 16)
    success_topic_arn       = optional(string)
    error_topic_arn         = optional(string)
  })
  default = null
  validation {
    condition     = (var.async != null) == (var.mode == "async")
    error_message = "async: give it for mode async, where output_uri says where answers go, and for no other mode."
  }
  validation {
    condition     = var.async == null ? true : alltrue([for uri in [var.async.input_uri, var.async.output_uri] : can(regex("^s3://[^/]+/.+$", uri))]) && var.async.target_backlog > 0 && var.async.max_concurrent_requests >= 1 && var.async.max_concurrent_requests <= 1000
    error_message = "async: input_uri and output_uri are s3://BUCKET/PREFIX, target_backlog is above 0, and max_concurrent_requests lies between 1 and 1000."
  }
}

variable "serverless" {
  description = "For mode serverless: memory in MB, and how many requests may run at once."
  type        = object({ memory_mb = number, max_concurrency = number })
  default     = { memory_mb = 4096, max_concurrency = 20 }
  validation {
    condition     = contains([1024, 2048, 3072, 4096, 5120, 6144], var.serverless.memory_mb) && var.serverless.max_concurrency >= 1 && var.serverless.max_concurrency <= 200
    error_message = "serverless: memory_mb is 1024, 2048, ... 6144, and max_concurrency lies between 1 and 200."
  }
}

variable "component" {
  description = "For mode scale-to-zero: what one copy of the model takes of an instance. accelerators null: one on GPU instances, none elsewhere. data_cache: whether instances keep the model and the image for the next copy."
  type        = object({ memory_mb = number, accelerators = optional(number), data_cache = optional(bool, true) })
  default     = { memory_mb = 4096 }
  validation {
    condition     = var.component.memory_mb >= 128
    error_message = "component.memory_mb: at least 128."
  }
}

variable "components" {
  description = "For mode scale-to-zero: further models on the same instances, by name. Each is invoked as NAME-KEY and scales between its copies; the instances follow all copies, up to capacity.max. image_uri, target_concurrency and data cache: those of the module where none is given."
  type = map(object({
    model_uri          = string
    image_uri          = optional(string)
    environment        = optional(map(string), {})
    memory_mb          = optional(number, 4096)
    accelerators       = optional(number)
    copies             = optional(object({ min = number, max = number }), { min = 0, max = 1 })
    target_concurrency = optional(number)
  }))
  default = {}
  validation {
    condition     = length(var.components) == 0 || var.mode == "scale-to-zero"
    error_message = "components: other modes have one model in each instance; give them with mode scale-to-zero."
  }
  validation {
    condition     = alltrue([for key, each in var.components : key != "main" && can(regex("^[a-zA-Z0-9](-?[a-zA-Z0-9]){0,19}$", key)) && can(regex("^s3://[^/]+/.+(/|\\.tar\\.gz)$", each.model_uri))])
    error_message = "components: a name has up to 20 letters, digits and single hyphens and is not main; model_uri is a prefix with a slash at its end, or an archive .tar.gz."
  }
  validation {
    condition     = alltrue([for each in values(var.components) : each.copies.min >= 0 && each.copies.max >= max(1, each.copies.min) && each.memory_mb >= 128 && (each.image_uri == null || can(regex("@sha256:[0-9a-f]{64}$", each.image_uri)))])
    error_message = "components: 0 <= copies.min <= copies.max, memory_mb of at least 128, and image_uri by digest."
  }
}

variable "schedule" {
  description = "Capacity by the clock, for modes realtime, multi-model and async: by name, when (at: cron(MINUTE HOUR DAY MONTH WEEKDAY YEAR) or at(YYYY-MM-DDThh:mm:ss)), the fewest and the most instances from then on, and the time zone."
  type        = map(object({ at = string, min = number, max = number, timezone = optional(string, "Etc/UTC") }))
  default     = {}
  validation {
    condition     = length(var.schedule) == 0 || contains(["realtime", "multi-model", "async"], var.mode)
    error_message = "schedule: serverless endpoints and components scale by their requests alone."
  }
  validation {
    condition     = alltrue([for each in values(var.schedule) : can(regex("^(cron|at|rate)\\(.+\\)$", each.at)) && each.max >= max(1, each.min) && each.min >= (var.mode == "async" ? 0 : 1)])
    error_message = "schedule: at is cron(...), at(...) or rate(...), and 1 <= min <= max (0 <= min for async)."
  }
}

variable "subnet_ids" {
  description = "Subnets for the instances; empty for none. With them, the S3 and ECR endpoints of the VPC are the caller's to make."
  type        = list(string)
  default     = []
  validation {
    condition     = length(var.subnet_ids) == 0 || var.mode != "serverless"
    error_message = "subnet_ids: serverless endpoints have no VPC."
  }
}

variable "security_group_ids" {
  description = "Security groups for the instances; needed with subnet_ids."
  type        = list(string)
  default     = []
  validation {
    condition     = (length(var.security_group_ids) > 0) == (length(var.subnet_ids) > 0)
    error_message = "security_group_ids and subnet_ids belong together: give both or none."
  }
}

variable "network_isolation" {
  description = "Give the container no network: SageMaker brings models and requests. Serverless endpoints cannot have it. false for Python models that call others, and for scripts whose requirements.txt is installed at the start."
  type        = bool
  default     = true
}

variable "volume_kms_key_arn" {
  description = "The key of the instances' storage volume; null for the service's own. Not for instances with local NVMe disks, which have a key of their hardware."
  type        = string
  default     = null
  validation {
    condition     = var.volume_kms_key_arn == null ? true : var.mode != "serverless" && !contains(var.gpu_families, try(split(".", var.instance_type)[1], "")) && !can(regex("^[a-z]+[0-9]+[a-z]*d[a-z]*$|^trn|^i[0-9]", try(split(".", var.instance_type)[1], "")))
    error_message = "volume_kms_key_arn: SageMaker refuses a key for instances with local NVMe disks (all with GPUs, and types such as m5d), and serverless has no volume; objects_kms_key_arn is the key of models and answers."
  }
}

variable "objects_kms_key_arn" {
  description = "The key of the objects in S3 (models, requests, answers) and of the bucket and repository made here; null for the services' own."
  type        = string
  default     = null
}

variable "rollout" {
  description = "How a new image or model takes over. type: CANARY, LINEAR, ALL_AT_ONCE or ROLLING; without it CANARY from two instances up and ALL_AT_ONCE below for real-time, and no guardrails for other modes. Set on an endpoint that had none, it replaces the endpoint. canary_percent or step_percent: the share of capacity that moves at once. How long each step is watched, and how long the old fleet is kept. The alarms undo each of them."
  type = object({
    type             = optional(string)
    canary_percent   = optional(number, 20)
    step_percent     = optional(number, 50)
    watch_seconds    = optional(number, 300)
    keep_old_seconds = optional(number, 300)
  })
  default = {}
  validation {
    condition     = var.rollout.type == null ? true : contains(["CANARY", "LINEAR", "ALL_AT_ONCE", "ROLLING"], var.rollout.type)
    error_message = "rollout.type: CANARY, LINEAR, ALL_AT_ONCE or ROLLING."
  }
  validation {
    condition     = var.rollout.canary_percent >= 1 && var.rollout.canary_percent <= 50
    error_message = "rollout.canary_percent: SageMaker takes 1 to 50."
  }
  validation {
    condition     = var.rollout.step_percent >= (var.rollout.type == "ROLLING" ? 5 : 10) && var.rollout.step_percent <= 50
    error_message = "rollout.step_percent: SageMaker takes 10 to 50 for LINEAR, and 5 to 50 for ROLLING."
  }
  validation {
    condition     = var.rollout.type == null ? true : !contains(["CANARY", "LINEAR"], var.rollout.type) || var.mode == "serverless" || var.capacity.min >= 2
    error_message = "rollout.type: a canary or a step is at most half of the instances, so that CANARY and LINEAR need capacity.min of 2 or more."
  }
  validation {
    condition     = var.rollout.type == null ? true : var.mode != "scale-to-zero" && (var.rollout.type != "ROLLING" || var.mode != "serverless")
    error_message = "rollout.type: none for scale-to-zero, and no ROLLING for serverless."
  }
}

variable "alarm" {
  description = "When to raise an alarm, and whom to tell: server errors in a minute, or the 99th percentile of the model's latency, in three minutes of five; topics."
  type        = object({ errors = number, latency_p99_seconds = number, topic_arns = list(string) })
  default     = { errors = 5, latency_p99_seconds = 5, topic_arns = [] }
}

variable "create_repository" {
  description = "Make an ECR repository for images, named after `name`, with immutable tags and a scan on push. Make it first (terraform apply -target=aws_ecr_repository.this), push, then name the image."
  type        = bool
  default     = false
}

variable "create_bucket" {
  description = "Make the bucket that model_uri names: private, encrypted, versioned. Needs models_path: the model is read from the bucket in the same apply."
  type        = bool
  default     = false
  validation {
    condition     = !var.create_bucket || var.models_path != null
    error_message = "create_bucket: give models_path as well, the folder of the model repository on this machine; an endpoint cannot start from an empty bucket."
  }
}

variable "models_path" {
  description = "A model repository on this machine, to upload below model_uri before the endpoint is made; null when the models are there already."
  type        = string
  default     = null
  validation {
    condition     = var.models_path == null ? true : endswith(var.model_uri, "/") && length(fileset(var.models_path, "**")) > 0
    error_message = "models_path: a folder with files in it, and model_uri a prefix, not an archive."
  }
}

variable "role_arn" {
  description = "A role that the endpoint runs as, which is there already; null makes one with the least rights."
  type        = string
  default     = null
}

variable "permissions_boundary_arn" {
  description = "The permissions boundary of the role made here; null for none."
  type        = string
  default     = null
}

variable "tags" {
  description = "Tags of everything that can have them."
  type        = map(string)
  default     = {}
}
