# remora on a SageMaker endpoint. One module, four modes: what differs is the endpoint configuration and the scaling.

data "aws_partition" "current" {}
data "aws_caller_identity" "current" {}
data "aws_region" "current" {}

locals {
  model_bucket = split("/", trimprefix(var.model_uri, "s3://"))[0]
  model_key    = trimprefix(var.model_uri, "s3://${local.model_bucket}/")
  archive      = endswith(var.model_uri, ".tar.gz")

  gpu          = contains(var.gpu_families, split(".", var.instance_type)[1])
  ami          = var.inference_ami_version != null ? var.inference_ami_version : (local.gpu ? "al2023-ami-sagemaker-inference-gpu-4-1" : null)
  accelerators = var.component.accelerators != null ? var.component.accelerators : (local.gpu ? 1 : 0)

  component = var.mode == "scale-to-zero"
  variant   = "remora"

  model_name = "${var.name}-${substr(sha256(jsonencode([var.image_uri, var.model_uri, var.environment, var.subnet_ids, var.security_group_ids, var.network_isolation])), 0, 12)}"
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
    encryption_type = var.kms_key_arn == null ? "AES256" : "KMS"
    kms_key         = var.kms_key_arn
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
      sse_algorithm     = var.kms_key_arn == null ? "AES256" : "aws:kms"
      kms_master_key_id = var.kms_key_arn
    }
  }
}

resource "aws_sagemaker_model" "this" {
  # A model cannot be changed in place: a new one is made before the old one goes, and needs another name.
  name               = local.model_name
  execution_role_arn = aws_iam_role.endpoint.arn
  tags               = var.tags

  enable_network_isolation = var.network_isolation

  primary_container {
    image       = var.image_uri
    environment = var.environment

    model_data_source {
      s3_data_source {
        s3_uri           = var.model_uri
        s3_data_type     = local.archive ? "S3Object" : "S3Prefix"
        compression_type = local.archive ? "Gzip" : "None"
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
  depends_on = [aws_iam_role_policy.endpoint]
}
