# remora as a Lambda function: models loaded while an environment starts, then one event at a time. Processors only.

data "aws_partition" "current" {}
data "aws_caller_identity" "current" {}

locals {
  bucket   = var.model_uri == null ? null : split("/", trimprefix(var.model_uri, "s3://"))[0]
  prefix   = var.model_uri == null ? null : trimprefix(var.model_uri, "s3://${local.bucket}/")
  role_arn = var.role_arn != null ? var.role_arn : aws_iam_role.this[0].arn
  # No more threads than processors, and at least one.
  threads = max(1, floor(var.memory_mb / 1769))
  statements = concat(
    [{
      Sid      = "WriteLogs"
      Effect   = "Allow"
      Action   = ["logs:CreateLogStream", "logs:PutLogEvents"]
      Resource = ["${aws_cloudwatch_log_group.this.arn}:*"]
    }],
    var.tracing == false ? [] : [{
      # Has no resource to narrow it down to.
      Sid      = "WriteTraces"
      Effect   = "Allow"
      Action   = ["xray:PutTelemetryRecords", "xray:PutTraceSegments"]
      Resource = ["*"]
    }],
    length(var.subnet_ids) == 0 ? [] : [{
      # As Lambda's guide asks for functions in a VPC; interfaces that are not made yet have no ARN.
      Sid    = "AttachToSubnets"
      Effect = "Allow"
      Action = [
        "ec2:CreateNetworkInterface", "ec2:DeleteNetworkInterface", "ec2:DescribeNetworkInterfaces",
        "ec2:AssignPrivateIpAddresses", "ec2:UnassignPrivateIpAddresses",
      ]
      Resource = ["*"]
    }],
    var.kms_key_arn == null ? [] : [{
      Sid      = "UseKey"
      Effect   = "Allow"
      Action   = ["kms:Decrypt"]
      Resource = [var.kms_key_arn]
    }],
    var.model_uri == null ? [] : [{
      Sid      = "ReadModels"
      Effect   = "Allow"
      Action   = ["s3:GetObject"]
      Resource = ["arn:${data.aws_partition.current.partition}:s3:::${local.bucket}/${local.prefix}*"]
    }],
  )
  list_statements = var.model_uri == null ? [] : [{
    Sid       = "ListModels"
    Effect    = "Allow"
    Action    = ["s3:ListBucket"]
    Resource  = ["arn:${data.aws_partition.current.partition}:s3:::${local.bucket}"]
    Condition = { StringLike = { "s3:prefix" = ["${local.prefix}*"] } }
  }]
}

resource "aws_cloudwatch_log_group" "this" {
  name              = "/aws/lambda/${var.name}"
  retention_in_days = var.log_days
  tags              = var.tags
}

resource "aws_iam_role" "this" {
  count                = var.role_arn == null ? 1 : 0
  name_prefix          = "${substr(var.name, 0, 30)}-"
  permissions_boundary = var.permissions_boundary_arn
  tags                 = var.tags
  assume_role_policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect    = "Allow"
      Action    = "sts:AssumeRole"
      Principal = { Service = "lambda.amazonaws.com" }
      Condition = { StringEquals = { "aws:SourceAccount" = data.aws_caller_identity.current.account_id } }
    }]
  })
}

resource "aws_iam_role_policy" "this" {
  count  = var.role_arn == null ? 1 : 0
  name   = "function"
  role   = aws_iam_role.this[0].id
  policy = jsonencode({ Version = "2012-10-17", Statement = concat(local.statements, local.list_statements) })
}

resource "aws_lambda_function" "this" {
  function_name                  = var.name
  role                           = local.role_arn
  package_type                   = "Image"
  image_uri                      = var.image_uri
  architectures                  = [var.architecture]
  memory_size                    = var.memory_mb
  timeout                        = var.timeout_seconds
  reserved_concurrent_executions = var.max_concurrency
  publish                        = var.kept_warm > 0
  kms_key_arn                    = var.kms_key_arn
  tags                           = var.tags

  dynamic "vpc_config" {
    for_each = length(var.subnet_ids) > 0 ? [1] : []
    content {
      subnet_ids         = var.subnet_ids
      security_group_ids = var.security_group_ids
    }
  }
  tracing_config {
    mode = var.tracing ? "Active" : "PassThrough"
  }
  ephemeral_storage {
    size = var.scratch_mb
  }
  environment {
    variables = merge(
      { OMP_NUM_THREADS = tostring(local.threads) },
      var.model_uri == null ? {} : { REMORA_MODEL_REPOSITORY = var.model_uri },
      var.environment,
    )
  }

  depends_on = [aws_iam_role_policy.this, aws_cloudwatch_log_group.this]
}

resource "aws_lambda_alias" "live" {
  count            = var.kept_warm > 0 ? 1 : 0
  name             = "live"
  function_name    = aws_lambda_function.this.function_name
  function_version = aws_lambda_function.this.version
}

resource "aws_lambda_provisioned_concurrency_config" "live" {
  count                             = var.kept_warm > 0 ? 1 : 0
  function_name                     = aws_lambda_function.this.function_name
  qualifier                         = aws_lambda_alias.live[0].name
  provisioned_concurrent_executions = var.kept_warm
}

resource "aws_lambda_function_url" "this" {
  count              = var.function_url ? 1 : 0
  function_name      = aws_lambda_function.this.function_name
  qualifier          = one(aws_lambda_alias.live[*].name)
  authorization_type = "AWS_IAM"
}
