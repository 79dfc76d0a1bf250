# What the endpoint may do: read its models, pull its image, write its logs and metrics. Nothing else of the account.

locals {
  arn = "arn:${data.aws_partition.current.partition}"
  statements = concat(
    [
      {
        Sid      = "ReadModels"
        Effect   = "Allow"
        Action   = ["s3:GetObject"]
        Resource = distinct([for each in local.containers : "${local.arn}:s3:::${each.bucket}/${each.key}${each.archive ? "" : "*"}"])
      },
      {
        Sid       = "ListModels"
        Effect    = "Allow"
        Action    = ["s3:ListBucket"]
        Resource  = distinct([for each in local.containers : "${local.arn}:s3:::${each.bucket}"])
        Condition = { StringLike = { "s3:prefix" = distinct([for each in local.containers : "${each.key}*"]) } }
      },
      {
        Sid      = "PullImage"
        Effect   = "Allow"
        Action   = ["ecr:BatchCheckLayerAvailability", "ecr:BatchGetImage", "ecr:GetDownloadUrlForLayer"]
        Resource = [for each in local.repositories : "${local.arn}:ecr:${data.aws_region.current.id}:*:repository/${each}"]
      },
      {
        # Has no resource to narrow it down to.
        Sid      = "PullToken"
        Effect   = "Allow"
        Action   = ["ecr:GetAuthorizationToken"]
        Resource = ["*"]
      },
      {
        Sid      = "WriteLogs"
        Effect   = "Allow"
        Action   = ["logs:CreateLogGroup", "logs:CreateLogStream", "logs:DescribeLogStreams", "logs:PutLogEvents"]
        Resource = ["${local.arn}:logs:${data.aws_region.current.id}:${data.aws_caller_identity.current.account_id}:log-group:/aws/sagemaker/*"]
      },
      {
        Sid       = "WriteMetrics"
        Effect    = "Allow"
        Action    = ["cloudwatch:PutMetricData"]
        Resource  = ["*"]
        Condition = { StringLike = { "cloudwatch:namespace" = ["AWS/SageMaker", "/aws/sagemaker/*"] } }
      },
    ],
    [for each in [
      {
        Sid      = "ReadRequests"
        Effect   = "Allow"
        Action   = ["s3:GetObject"]
        Resource = ["${local.arn}:s3:::${local.requests}/*"]
      },
      {
        Sid      = "WriteAnswers"
        Effect   = "Allow"
        Action   = ["s3:AbortMultipartUpload", "s3:GetObject", "s3:PutObject"]
        Resource = ["${local.arn}:s3:::${local.answers}/*"]
      },
      {
        Sid       = "ListRequestsAndAnswers"
        Effect    = "Allow"
        Action    = ["s3:ListBucket"]
        Resource  = distinct([for each in [local.requests, local.answers] : "${local.arn}:s3:::${split("/", each)[0]}"])
        Condition = { StringLike = { "s3:prefix" = [for each in [local.requests, local.answers] : "${join("/", slice(split("/", each), 1, length(split("/", each))))}/*"] } }
      },
    ] : each if var.async != null],
    length(local.topics) == 0 ? [] : [
      { Sid = "Tell", Effect = "Allow", Action = ["sns:Publish"], Resource = local.topics },
    ],
    var.objects_kms_key_arn == null ? [] : [
      { Sid = "UseKey", Effect = "Allow", Action = ["kms:Decrypt", "kms:GenerateDataKey"], Resource = [var.objects_kms_key_arn] },
    ],
    [for each in [
      {
        # The volume is attached by SageMaker under a grant of the role.
        Sid       = "GrantVolumeKey"
        Effect    = "Allow"
        Action    = ["kms:CreateGrant"]
        Resource  = [var.volume_kms_key_arn]
        Condition = { Bool = { "kms:GrantIsForAWSResource" = "true" } }
      },
      { Sid = "UseVolumeKey", Effect = "Allow", Action = ["kms:Decrypt", "kms:DescribeKey", "kms:GenerateDataKeyWithoutPlaintext"], Resource = [var.volume_kms_key_arn] },
    ] : each if var.volume_kms_key_arn != null],
    length(var.subnet_ids) == 0 ? [] : [
      {
        # As SageMaker's guide asks for endpoints in a VPC; interfaces that are not made yet have no ARN.
        Sid    = "AttachToSubnets"
        Effect = "Allow"
        Action = [
          "ec2:CreateNetworkInterface", "ec2:CreateNetworkInterfacePermission", "ec2:DeleteNetworkInterface",
          "ec2:DeleteNetworkInterfacePermission", "ec2:DescribeDhcpOptions", "ec2:DescribeNetworkInterfaces",
          "ec2:DescribeSecurityGroups", "ec2:DescribeSubnets", "ec2:DescribeVpcs",
        ]
        Resource = ["*"]
      },
    ],
  )
  repositories = distinct([for each in local.containers : split("@", join("/", slice(split("/", each.image_uri), 1, length(split("/", each.image_uri)))))[0]])
  requests     = var.async == null ? "" : trimsuffix(trimprefix(var.async.input_uri, "s3://"), "/")
  answers      = var.async == null ? "" : trimsuffix(trimprefix(var.async.output_uri, "s3://"), "/")
  role_arn     = var.role_arn != null ? var.role_arn : aws_iam_role.endpoint[0].arn
  topics       = var.async == null ? [] : compact([var.async.success_topic_arn, var.async.error_topic_arn])
}

resource "aws_iam_role" "endpoint" {
  count                = var.role_arn == null ? 1 : 0
  name_prefix          = "${substr(var.name, 0, 30)}-"
  permissions_boundary = var.permissions_boundary_arn
  tags                 = var.tags
  assume_role_policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect    = "Allow"
      Action    = "sts:AssumeRole"
      Principal = { Service = "sagemaker.amazonaws.com" }
      Condition = { StringEquals = { "aws:SourceAccount" = data.aws_caller_identity.current.account_id } }
    }]
  })
}

resource "aws_iam_role_policy" "endpoint" {
  count  = var.role_arn == null ? 1 : 0
  name   = "endpoint"
  role   = aws_iam_role.endpoint[0].id
  policy = jsonencode({ Version = "2012-10-17", Statement = local.statements })
}
