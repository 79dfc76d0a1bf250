# remora on a SageMaker endpoint. One module, five modes: what differs is the endpoint configuration and the scaling.

data "aws_partition" "current" {}
data "aws_caller_identity" "current" {}
data "aws_region" "current" {}

locals {
  model_bucket = split("/", trimprefix(var.model_uri, "s3://"))[0]
  model_key    = trimprefix(var.model_uri, "s3://${local.model_bucket}/")

  family       = split(".", var.instance_type)[1]
  gpu          = contains(var.gpu_families, local.family)
  ami          = var.inference_ami_version != null ? var.inference_ami_version : (local.gpu ? "al2023-ami-sagemaker-inference-gpu-4-1" : null)
  accelerators = var.component.accelerators != null ? var.component.accelerators : (local.gpu ? 1 : 0)

  component   = var.mode == "scale-to-zero"
  multi_model = var.mode == "multi-model"
  variant     = "remora"

  # Files of models_path go below a digest of their content: a changed model is a new place, and an instance that
  # starts late never reads files of two versions.
  files     = var.models_path == null ? [] : sort(fileset(var.models_path, "**"))
  contents  = substr(sha256(jsonencode({ for file in local.files : file => filesha256("${var.models_path}/${file}") })), 0, 12)
  model_uri = var.models_path == null ? var.model_uri : "${var.model_uri}${local.contents}/"

  current = { image_uri = var.image_uri, model_uri = local.model_uri, environment = var.environment }
  # What runs beside the current release on the instances of the endpoint.
  packed = [for key in sort(keys(var.components)) : {
    image_uri   = coalesce(var.components[key].image_uri, var.image_uri)
    model_uri   = var.components[key].model_uri
    environment = merge(local.gpu && coalesce(var.components[key].accelerators, 1) > 0 ? local.required : {}, var.components[key].environment)
  }]
  # On GPUs a server that cannot use one is not ready, instead of serving by the processors.
  required = { REMORA_REQUIRE_GPU = "true" }
  on_gpu   = local.gpu && var.mode != "serverless" && (!local.component || local.accelerators > 0)
  # Every release, the current one first, and every further component, with the name of its model. Names are made of the
  # content.
  containers = [for each in concat([for one in concat([local.current], var.previous) : merge(one, {
    environment = merge(local.on_gpu ? local.required : {}, one.environment)
    })], local.packed) : merge(each, {
    archive = endswith(each.model_uri, ".tar.gz")
    bucket  = split("/", trimprefix(each.model_uri, "s3://"))[0]
    key     = join("/", slice(split("/", trimprefix(each.model_uri, "s3://")), 1, length(split("/", trimprefix(each.model_uri, "s3://")))))
    model   = "${var.name}-${substr(sha256(jsonencode(concat([each.image_uri, each.model_uri, each.environment, var.subnet_ids, var.security_group_ids, var.network_isolation, var.role_arn], local.multi_model ? ["multi-model"] : []))), 0, 12)}"
  })]
  releases   = slice(local.containers, 0, 1 + length(var.previous))
  model_name = local.releases[0].model
}

resource "aws_ecr_repository" "this" {
  count                = var.create_repository ? 1 : 0
  name                 = lower(var.name)
  image_tag_mutability = "IMMUTABLE"
  tags                 = var.tags

  image_scanning_configuration {
    scan_on_push = true
  }
  encryption_configuration {
    encryption_type = var.objects_kms_key_arn == null ? "AES256" : "KMS"
    kms_key         = var.objects_kms_key_arn
  }
}

resource "aws_s3_bucket" "models" {
  count  = var.create_bucket ? 1 : 0
  bucket = local.model_bucket
  tags   = var.tags
}

resource "aws_s3_bucket_public_access_block" "models" {
  count                   = var.create_bucket ? 1 : 0
  bucket                  = aws_s3_bucket.models[0].id
  block_public_acls       = true
  block_public_policy     = true
  ignore_public_acls      = true
  restrict_public_buckets = true
}

resource "aws_s3_bucket_versioning" "models" {
  count  = var.create_bucket ? 1 : 0
  bucket = aws_s3_bucket.models[0].id
  versioning_configuration {
    status = "Enabled"
  }
}

resource "aws_s3_bucket_server_side_encryption_configuration" "models" {
  count  = var.create_bucket ? 1 : 0
  bucket = aws_s3_bucket.models[0].id
  rule {
    bucket_key_enabled = true
    apply_server_side_encryption_by_default {
      sse_algorithm     = var.objects_kms_key_arn == null ? "AES256" : "aws:kms"
      kms_master_key_id = var.objects_kms_key_arn
    }
  }
}

resource "aws_s3_object" "models" {
  for_each           = toset(local.files)
  bucket             = local.model_bucket
  key                = "${local.model_key}${local.contents}/${each.value}"
  source             = "${var.models_path}/${each.value}"
  source_hash        = filesha256("${var.models_path}/${each.value}")
  kms_key_id         = var.objects_kms_key_arn
  bucket_key_enabled = var.objects_kms_key_arn == null ? null : true

  lifecycle {
    create_before_destroy = true
  }
  depends_on = [
    aws_s3_bucket.models,
    aws_s3_bucket_public_access_block.models,
    aws_s3_bucket_server_side_encryption_configuration.models,
    aws_s3_bucket_versioning.models,
  ]
}

# A model cannot be changed in place, and an endpoint whose update SageMaker undoes needs its earlier one: each release
# has a separate model, by its name. One that is no longer listed is deleted after the endpoint's update, if that
# succeeded (postcondition of aws_sagemaker_endpoint.this).
resource "aws_sagemaker_model" "this" {
  for_each           = { for each in local.containers : each.model => each... }
  name               = each.key
  execution_role_arn = local.role_arn
  tags               = var.tags

  # A serverless endpoint refuses a model without a network.
  enable_network_isolation = var.mode == "serverless" ? false : var.network_isolation

  primary_container {
    image       = each.value[0].image_uri
    environment = each.value[0].environment
    # Archives below a prefix, which SageMaker brings when a request names one, or the one archive: serverless endpoints
    # and batch transform take no other form.
    mode           = local.multi_model ? "MultiModel" : null
    model_data_url = local.multi_model || each.value[0].archive ? each.value[0].model_uri : null

    dynamic "model_data_source" {
      for_each = local.multi_model || each.value[0].archive ? [] : [each.value[0]]
      content {
        s3_data_source {
          s3_uri           = model_data_source.value.model_uri
          s3_data_type     = "S3Prefix"
          compression_type = "None"
        }
      }
    }
  }

  dynamic "vpc_config" {
    for_each = length(var.subnet_ids) > 0 ? [1] : []
    content {
      subnets            = var.subnet_ids
      security_group_ids = var.security_group_ids
    }
  }

  lifecycle {
    create_before_destroy = true
  }
  depends_on = [aws_iam_role_policy.endpoint, aws_s3_object.models]
}
