module @jit_f attributes {mhlo.num_partitions = 1 : i32, mhlo.num_replicas = 1 : i32} {
  func.func public @main(%arg0: tensor<768x768xf32> {tf.aliasing_output = 0 : i32}, %arg1: tensor<768x768xf32> {tf.aliasing_output = 1 : i32}, %arg2: tensor<768x768xf32> {tf.aliasing_output = 2 : i32}, %arg3: tensor<768x768xf32> {tf.aliasing_output = 3 : i32}, %arg4: tensor<768x768xf32> {tf.aliasing_output = 4 : i32}, %arg5: tensor<768x768xf32> {tf.aliasing_output = 5 : i32}, %arg6: tensor<768x768xf32> {tf.aliasing_output = 6 : i32}, %arg7: tensor<768x768xf32> {tf.aliasing_output = 7 : i32}, %arg8: tensor<768x768xf32> {tf.aliasing_output = 8 : i32}, %arg9: tensor<768x768xf32> {tf.aliasing_output = 9 : i32}, %arg10: tensor<768x768xf32> {tf.aliasing_output = 10 : i32}, %arg11: tensor<768x768xf32> {tf.aliasing_output = 11 : i32}, %arg12: tensor<768x768xf32> {tf.aliasing_output = 12 : i32}, %arg13: tensor<768x768xf32> {tf.aliasing_output = 13 : i32}, %arg14: tensor<768x768xf32> {tf.aliasing_output = 14 : i32}, %arg15: tensor<768x768xf32> {tf.aliasing_output = 15 : i32}, %arg16: tensor<768x768xf32> {tf.aliasing_output = 16 : i32}, %arg17: tensor<768x768xf32> {tf.aliasing_output = 17 : i32}, %arg18: tensor<768x768xf32> {tf.aliasing_output = 18 : i32}, %arg19: tensor<768x768xf32> {tf.aliasing_output = 19 : i32}, %arg20: tensor<i32> {tf.aliasing_output = 20 : i32}, %arg21: tensor<768x768xf32> {tf.aliasing_output = 21 : i32}, %arg22: tensor<768x768xf32> {tf.aliasing_output = 22 : i32}, %arg23: tensor<768x768xf32> {tf.aliasing_output = 23 : i32}, %arg24: tensor<768x768xf32> {tf.aliasing_output = 24 : i32}, %arg25: tensor<768x768xf32> {tf.aliasing_output = 25 : i32}, %arg26: tensor<768x768xf32> {tf.aliasing_output = 26 : i32}, %arg27: tensor<768x768xf32> {tf.aliasing_output = 27 : i32}, %arg28: tensor<768x768xf32> {tf.aliasing_output = 28 : i32}, %arg29: tensor<768x768xf32> {tf.aliasing_output = 29 : i32}, %arg30: tensor<768x768xf32> {tf.aliasing_output = 30 : i32}, %arg31: tensor<768x768xf32> {tf.aliasing_output = 31 : i32}, %arg32: tensor<768x768xf32> {tf.aliasing_output = 32 : i32}, %arg33: tensor<768x768xf32> {tf.aliasing_output = 33 : i32}, %arg34: tensor<768x768xf32> {tf.aliasing_output = 34 : i32}, %arg35: tensor<768x768xf32> {tf.aliasing_output = 35 : i32}, %arg36: tensor<768x768xf32> {tf.aliasing_output = 36 : i32}, %arg37: tensor<768x768xf32> {tf.aliasing_output = 37 : i32}, %arg38: tensor<768x768xf32> {tf.aliasing_output = 38 : i32}, %arg39: tensor<768x768xf32> {tf.aliasing_output = 39 : i32}, %arg40: tensor<768x768xf32> {tf.aliasing_output = 40 : i32}, %arg41: tensor<768x768xf32> {tf.aliasing_output = 41 : i32}, %arg42: tensor<768x768xf32> {tf.aliasing_output = 42 : i32}, %arg43: tensor<768x768xf32> {tf.aliasing_output = 43 : i32}, %arg44: tensor<768x768xf32> {tf.aliasing_output = 44 : i32}, %arg45: tensor<768x768xf32> {tf.aliasing_output = 45 : i32}, %arg46: tensor<768x768xf32> {tf.aliasing_output = 46 : i32}, %arg47: tensor<768x768xf32> {tf.aliasing_output = 47 : i32}, %arg48: tensor<768x768xf32> {tf.aliasing_output = 48 : i32}, %arg49: tensor<768x768xf32> {tf.aliasing_output = 49 : i32}, %arg50: tensor<768x768xf32> {tf.aliasing_output = 50 : i32}, %arg51: tensor<768x768xf32> {tf.aliasing_output = 51 : i32}, %arg52: tensor<768x768xf32> {tf.aliasing_output = 52 : i32}, %arg53: tensor<768x768xf32> {tf.aliasing_output = 53 : i32}, %arg54: tensor<768x768xf32> {tf.aliasing_output = 54 : i32}, %arg55: tensor<768x768xf32> {tf.aliasing_output = 55 : i32}, %arg56: tensor<768x768xf32> {tf.aliasing_output = 56 : i32}, %arg57: tensor<768x768xf32> {tf.aliasing_output = 57 : i32}, %arg58: tensor<768x768xf32> {tf.aliasing_output = 58 : i32}, %arg59: tensor<768x768xf32> {tf.aliasing_output = 59 : i32}, %arg60: tensor<768x768xf32> {tf.aliasing_output = 60 : i32}, %arg61: tensor<768x768xf32>, %arg62: tensor<768x768xf32>, %arg63: tensor<768x768xf32>, %arg64: tensor<768x768xf32>, %arg65: tensor<768x768xf32>, %arg66: tensor<768x768xf32>, %arg67: tensor<768x768xf32>, %arg68: tensor<768x768xf32>, %arg69: tensor<768x768xf32>, %arg70: tensor<768x768xf32>, %arg71: tensor<768x768xf32>, %arg72: tensor<768x768xf32>, %arg73: tensor<768x768xf32>, %arg74: tensor<768x768xf32>, %arg75: tensor<768x768xf32>, %arg76: tensor<768x768xf32>, %arg77: tensor<768x768xf32>, %arg78: tensor<768x768xf32>, %arg79: tensor<768x768xf32>, %arg80: tensor<768x768xf32>) -> (tensor<768x768xf32> {jax.result_info = "result[0][0]"}, tensor<768x768xf32> {jax.result_info = "result[0][1]"}, tensor<768x768xf32> {jax.result_info = "result[0][2]"}, tensor<768x768xf32> {jax.result_info = "result[0][3]"}, tensor<768x768xf32> {jax.result_info = "result[0][4]"}, tensor<768x768xf32> {jax.result_info = "result[0][5]"}, tensor<768x768xf32> {jax.result_info = "result[0][6]"}, tensor<768x768xf32> {jax.result_info = "result[0][7]"}, tensor<768x768xf32> {jax.result_info = "result[0][8]"}, tensor<768x768xf32> {jax.result_info = "result[0][9]"}, tensor<768x768xf32> {jax.result_info = "result[0][10]"}, tensor<768x768xf32> {jax.result_info = "result[0][11]"}, tensor<768x768xf32> {jax.result_info = "result[0][12]"}, tensor<768x768xf32> {jax.result_info = "result[0][13]"}, tensor<768x768xf32> {jax.result_info = "result[0][14]"}, tensor<768x768xf32> {jax.result_info = "result[0][15]"}, tensor<768x768xf32> {jax.result_info = "result[0][16]"}, tensor<768x768xf32> {jax.result_info = "result[0][17]"}, tensor<768x768xf32> {jax.result_info = "result[0][18]"}, tensor<768x768xf32> {jax.result_info = "result[0][19]"}, tensor<i32> {jax.result_info = "result[1][0].count"}, tensor<768x768xf32> {jax.result_info = "result[1][0].mu[0]"}, tensor<768x768xf32> {jax.result_info = "result[1][0].mu[1]"}, tensor<768x768xf32> {jax.result_info = "result[1][0].mu[2]"}, tensor<768x768xf32> {jax.result_info = "result[1][0].mu[3]"}, tensor<768x768xf32> {jax.result_info = "result[1][0].mu[4]"}, tensor<768x768xf32> {jax.result_info = "result[1][0].mu[5]"}, tensor<768x768xf32> {jax.result_info = "result[1][0].mu[6]"}, tensor<768x768xf32> {jax.result_info = "result[1][0].mu[7]"}, tensor<768x768xf32> {jax.result_info = "result[1][0].mu[8]"}, tensor<768x768xf32> {jax.result_info = "result[1][0].mu[9]"}, tensor<768x768xf32> {jax.result_info = "result[1][0].mu[10]"}, tensor<768x768xf32> {jax.result_info = "result[1][0].mu[11]"}, tensor<768x768xf32> {jax.result_info = "result[1][0].mu[12]"}, tensor<768x768xf32> {jax.result_info = "result[1][0].mu[13]"}, tensor<768x768xf32> {jax.result_info = "result[1][0].mu[14]"}, tensor<768x768xf32> {jax.result_info = "result[1][0].mu[15]"}, tensor<768x768xf32> {jax.result_info = "result[1][0].mu[16]"}, tensor<768x768xf32> {jax.result_info = "result[1][0].mu[17]"}, tensor<768x768xf32> {jax.result_info = "result[1][0].mu[18]"}, tensor<768x768xf32> {jax.result_info = "result[1][0].mu[19]"}, tensor<768x768xf32> {jax.result_info = "result[1][0].nu[0]"}, tensor<768x768xf32> {jax.result_info = "result[1][0].nu[1]"}, tensor<768x768xf32> {jax.result_info = "result[1][0].nu[2]"}, tensor<768x768xf32> {jax.result_info = "result[1][0].nu[3]"}, tensor<768x768xf32> {jax.result_info = "result[1][0].nu[4]"}, tensor<768x768xf32> {jax.result_info = "result[1][0].nu[5]"}, tensor<768x768xf32> {jax.result_info = "result[1][0].nu[6]"}, tensor<768x768xf32> {jax.result_info = "result[1][0].nu[7]"}, tensor<768x768xf32> {jax.result_info = "result[1][0].nu[8]"}, tensor<768x768xf32> {jax.result_info = "result[1][0].nu[9]"}, tensor<768x768xf32> {jax.result_info = "result[1][0].nu[10]"}, tensor<768x768xf32> {jax.result_info = "result[1][0].nu[11]"}, tensor<768x768xf32> {jax.result_info = "result[1][0].nu[12]"}, tensor<768x768xf32> {jax.result_info = "result[1][0].nu[13]"}, tensor<768x768xf32> {jax.result_info = "result[1][0].nu[14]"}, tensor<768x768xf32> {jax.result_info = "result[1][0].nu[15]"}, tensor<768x768xf32> {jax.result_info = "result[1][0].nu[16]"}, tensor<768x768xf32> {jax.result_info = "result[1][0].nu[17]"}, tensor<768x768xf32> {jax.result_info = "result[1][0].nu[18]"}, tensor<768x768xf32> {jax.result_info = "result[1][0].nu[19]"}) {
    %cst = stablehlo.constant dense<1.000000e-01> : tensor<f32>
    %0 = stablehlo.broadcast_in_dim %cst, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %1 = stablehlo.multiply %0, %arg61 : tensor<768x768xf32>
    %cst_0 = stablehlo.constant dense<0.899999976> : tensor<f32>
    %2 = stablehlo.broadcast_in_dim %cst_0, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %3 = stablehlo.multiply %2, %arg21 : tensor<768x768xf32>
    %4 = stablehlo.add %1, %3 : tensor<768x768xf32>
    %cst_1 = stablehlo.constant dense<1.000000e-01> : tensor<f32>
    %5 = stablehlo.broadcast_in_dim %cst_1, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %6 = stablehlo.multiply %5, %arg62 : tensor<768x768xf32>
    %cst_2 = stablehlo.constant dense<0.899999976> : tensor<f32>
    %7 = stablehlo.broadcast_in_dim %cst_2, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %8 = stablehlo.multiply %7, %arg22 : tensor<768x768xf32>
    %9 = stablehlo.add %6, %8 : tensor<768x768xf32>
    %cst_3 = stablehlo.constant dense<1.000000e-01> : tensor<f32>
    %10 = stablehlo.broadcast_in_dim %cst_3, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %11 = stablehlo.multiply %10, %arg63 : tensor<768x768xf32>
    %cst_4 = stablehlo.constant dense<0.899999976> : tensor<f32>
    %12 = stablehlo.broadcast_in_dim %cst_4, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %13 = stablehlo.multiply %12, %arg23 : tensor<768x768xf32>
    %14 = stablehlo.add %11, %13 : tensor<768x768xf32>
    %cst_5 = stablehlo.constant dense<1.000000e-01> : tensor<f32>
    %15 = stablehlo.broadcast_in_dim %cst_5, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %16 = stablehlo.multiply %15, %arg64 : tensor<768x768xf32>
    %cst_6 = stablehlo.constant dense<0.899999976> : tensor<f32>
    %17 = stablehlo.broadcast_in_dim %cst_6, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %18 = stablehlo.multiply %17, %arg24 : tensor<768x768xf32>
    %19 = stablehlo.add %16, %18 : tensor<768x768xf32>
    %cst_7 = stablehlo.constant dense<1.000000e-01> : tensor<f32>
    %20 = stablehlo.broadcast_in_dim %cst_7, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %21 = stablehlo.multiply %20, %arg65 : tensor<768x768xf32>
    %cst_8 = stablehlo.constant dense<0.899999976> : tensor<f32>
    %22 = stablehlo.broadcast_in_dim %cst_8, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %23 = stablehlo.multiply %22, %arg25 : tensor<768x768xf32>
    %24 = stablehlo.add %21, %23 : tensor<768x768xf32>
    %cst_9 = stablehlo.constant dense<1.000000e-01> : tensor<f32>
    %25 = stablehlo.broadcast_in_dim %cst_9, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %26 = stablehlo.multiply %25, %arg66 : tensor<768x768xf32>
    %cst_10 = stablehlo.constant dense<0.899999976> : tensor<f32>
    %27 = stablehlo.broadcast_in_dim %cst_10, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %28 = stablehlo.multiply %27, %arg26 : tensor<768x768xf32>
    %29 = stablehlo.add %26, %28 : tensor<768x768xf32>
    %cst_11 = stablehlo.constant dense<1.000000e-01> : tensor<f32>
    %30 = stablehlo.broadcast_in_dim %cst_11, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %31 = stablehlo.multiply %30, %arg67 : tensor<768x768xf32>
    %cst_12 = stablehlo.constant dense<0.899999976> : tensor<f32>
    %32 = stablehlo.broadcast_in_dim %cst_12, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %33 = stablehlo.multiply %32, %arg27 : tensor<768x768xf32>
    %34 = stablehlo.add %31, %33 : tensor<768x768xf32>
    %cst_13 = stablehlo.constant dense<1.000000e-01> : tensor<f32>
    %35 = stablehlo.broadcast_in_dim %cst_13, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %36 = stablehlo.multiply %35, %arg68 : tensor<768x768xf32>
    %cst_14 = stablehlo.constant dense<0.899999976> : tensor<f32>
    %37 = stablehlo.broadcast_in_dim %cst_14, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %38 = stablehlo.multiply %37, %arg28 : tensor<768x768xf32>
    %39 = stablehlo.add %36, %38 : tensor<768x768xf32>
    %cst_15 = stablehlo.constant dense<1.000000e-01> : tensor<f32>
    %40 = stablehlo.broadcast_in_dim %cst_15, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %41 = stablehlo.multiply %40, %arg69 : tensor<768x768xf32>
    %cst_16 = stablehlo.constant dense<0.899999976> : tensor<f32>
    %42 = stablehlo.broadcast_in_dim %cst_16, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %43 = stablehlo.multiply %42, %arg29 : tensor<768x768xf32>
    %44 = stablehlo.add %41, %43 : tensor<768x768xf32>
    %cst_17 = stablehlo.constant dense<1.000000e-01> : tensor<f32>
    %45 = stablehlo.broadcast_in_dim %cst_17, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %46 = stablehlo.multiply %45, %arg70 : tensor<768x768xf32>
    %cst_18 = stablehlo.constant dense<0.899999976> : tensor<f32>
    %47 = stablehlo.broadcast_in_dim %cst_18, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %48 = stablehlo.multiply %47, %arg30 : tensor<768x768xf32>
    %49 = stablehlo.add %46, %48 : tensor<768x768xf32>
    %cst_19 = stablehlo.constant dense<1.000000e-01> : tensor<f32>
    %50 = stablehlo.broadcast_in_dim %cst_19, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %51 = stablehlo.multiply %50, %arg71 : tensor<768x768xf32>
    %cst_20 = stablehlo.constant dense<0.899999976> : tensor<f32>
    %52 = stablehlo.broadcast_in_dim %cst_20, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %53 = stablehlo.multiply %52, %arg31 : tensor<768x768xf32>
    %54 = stablehlo.add %51, %53 : tensor<768x768xf32>
    %cst_21 = stablehlo.constant dense<1.000000e-01> : tensor<f32>
    %55 = stablehlo.broadcast_in_dim %cst_21, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %56 = stablehlo.multiply %55, %arg72 : tensor<768x768xf32>
    %cst_22 = stablehlo.constant dense<0.899999976> : tensor<f32>
    %57 = stablehlo.broadcast_in_dim %cst_22, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %58 = stablehlo.multiply %57, %arg32 : tensor<768x768xf32>
    %59 = stablehlo.add %56, %58 : tensor<768x768xf32>
    %cst_23 = stablehlo.constant dense<1.000000e-01> : tensor<f32>
    %60 = stablehlo.broadcast_in_dim %cst_23, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %61 = stablehlo.multiply %60, %arg73 : tensor<768x768xf32>
    %cst_24 = stablehlo.constant dense<0.899999976> : tensor<f32>
    %62 = stablehlo.broadcast_in_dim %cst_24, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %63 = stablehlo.multiply %62, %arg33 : tensor<768x768xf32>
    %64 = stablehlo.add %61, %63 : tensor<768x768xf32>
    %cst_25 = stablehlo.constant dense<1.000000e-01> : tensor<f32>
    %65 = stablehlo.broadcast_in_dim %cst_25, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %66 = stablehlo.multiply %65, %arg74 : tensor<768x768xf32>
    %cst_26 = stablehlo.constant dense<0.899999976> : tensor<f32>
    %67 = stablehlo.broadcast_in_dim %cst_26, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %68 = stablehlo.multiply %67, %arg34 : tensor<768x768xf32>
    %69 = stablehlo.add %66, %68 : tensor<768x768xf32>
    %cst_27 = stablehlo.constant dense<1.000000e-01> : tensor<f32>
    %70 = stablehlo.broadcast_in_dim %cst_27, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %71 = stablehlo.multiply %70, %arg75 : tensor<768x768xf32>
    %cst_28 = stablehlo.constant dense<0.899999976> : tensor<f32>
    %72 = stablehlo.broadcast_in_dim %cst_28, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %73 = stablehlo.multiply %72, %arg35 : tensor<768x768xf32>
    %74 = stablehlo.add %71, %73 : tensor<768x768xf32>
    %cst_29 = stablehlo.constant dense<1.000000e-01> : tensor<f32>
    %75 = stablehlo.broadcast_in_dim %cst_29, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %76 = stablehlo.multiply %75, %arg76 : tensor<768x768xf32>
    %cst_30 = stablehlo.constant dense<0.899999976> : tensor<f32>
    %77 = stablehlo.broadcast_in_dim %cst_30, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %78 = stablehlo.multiply %77, %arg36 : tensor<768x768xf32>
    %79 = stablehlo.add %76, %78 : tensor<768x768xf32>
    %cst_31 = stablehlo.constant dense<1.000000e-01> : tensor<f32>
    %80 = stablehlo.broadcast_in_dim %cst_31, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %81 = stablehlo.multiply %80, %arg77 : tensor<768x768xf32>
    %cst_32 = stablehlo.constant dense<0.899999976> : tensor<f32>
    %82 = stablehlo.broadcast_in_dim %cst_32, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %83 = stablehlo.multiply %82, %arg37 : tensor<768x768xf32>
    %84 = stablehlo.add %81, %83 : tensor<768x768xf32>
    %cst_33 = stablehlo.constant dense<1.000000e-01> : tensor<f32>
    %85 = stablehlo.broadcast_in_dim %cst_33, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %86 = stablehlo.multiply %85, %arg78 : tensor<768x768xf32>
    %cst_34 = stablehlo.constant dense<0.899999976> : tensor<f32>
    %87 = stablehlo.broadcast_in_dim %cst_34, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %88 = stablehlo.multiply %87, %arg38 : tensor<768x768xf32>
    %89 = stablehlo.add %86, %88 : tensor<768x768xf32>
    %cst_35 = stablehlo.constant dense<1.000000e-01> : tensor<f32>
    %90 = stablehlo.broadcast_in_dim %cst_35, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %91 = stablehlo.multiply %90, %arg79 : tensor<768x768xf32>
    %cst_36 = stablehlo.constant dense<0.899999976> : tensor<f32>
    %92 = stablehlo.broadcast_in_dim %cst_36, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %93 = stablehlo.multiply %92, %arg39 : tensor<768x768xf32>
    %94 = stablehlo.add %91, %93 : tensor<768x768xf32>
    %cst_37 = stablehlo.constant dense<1.000000e-01> : tensor<f32>
    %95 = stablehlo.broadcast_in_dim %cst_37, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %96 = stablehlo.multiply %95, %arg80 : tensor<768x768xf32>
    %cst_38 = stablehlo.constant dense<0.899999976> : tensor<f32>
    %97 = stablehlo.broadcast_in_dim %cst_38, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %98 = stablehlo.multiply %97, %arg40 : tensor<768x768xf32>
    %99 = stablehlo.add %96, %98 : tensor<768x768xf32>
    %100 = stablehlo.multiply %arg61, %arg61 : tensor<768x768xf32>
    %cst_39 = stablehlo.constant dense<1.000000e-03> : tensor<f32>
    %101 = stablehlo.broadcast_in_dim %cst_39, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %102 = stablehlo.multiply %101, %100 : tensor<768x768xf32>
    %cst_40 = stablehlo.constant dense<9.990000e-01> : tensor<f32>
    %103 = stablehlo.broadcast_in_dim %cst_40, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %104 = stablehlo.multiply %103, %arg41 : tensor<768x768xf32>
    %105 = stablehlo.add %102, %104 : tensor<768x768xf32>
    %106 = stablehlo.multiply %arg62, %arg62 : tensor<768x768xf32>
    %cst_41 = stablehlo.constant dense<1.000000e-03> : tensor<f32>
    %107 = stablehlo.broadcast_in_dim %cst_41, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %108 = stablehlo.multiply %107, %106 : tensor<768x768xf32>
    %cst_42 = stablehlo.constant dense<9.990000e-01> : tensor<f32>
    %109 = stablehlo.broadcast_in_dim %cst_42, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %110 = stablehlo.multiply %109, %arg42 : tensor<768x768xf32>
    %111 = stablehlo.add %108, %110 : tensor<768x768xf32>
    %112 = stablehlo.multiply %arg63, %arg63 : tensor<768x768xf32>
    %cst_43 = stablehlo.constant dense<1.000000e-03> : tensor<f32>
    %113 = stablehlo.broadcast_in_dim %cst_43, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %114 = stablehlo.multiply %113, %112 : tensor<768x768xf32>
    %cst_44 = stablehlo.constant dense<9.990000e-01> : tensor<f32>
    %115 = stablehlo.broadcast_in_dim %cst_44, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %116 = stablehlo.multiply %115, %arg43 : tensor<768x768xf32>
    %117 = stablehlo.add %114, %116 : tensor<768x768xf32>
    %118 = stablehlo.multiply %arg64, %arg64 : tensor<768x768xf32>
    %cst_45 = stablehlo.constant dense<1.000000e-03> : tensor<f32>
    %119 = stablehlo.broadcast_in_dim %cst_45, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %120 = stablehlo.multiply %119, %118 : tensor<768x768xf32>
    %cst_46 = stablehlo.constant dense<9.990000e-01> : tensor<f32>
    %121 = stablehlo.broadcast_in_dim %cst_46, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %122 = stablehlo.multiply %121, %arg44 : tensor<768x768xf32>
    %123 = stablehlo.add %120, %122 : tensor<768x768xf32>
    %124 = stablehlo.multiply %arg65, %arg65 : tensor<768x768xf32>
    %cst_47 = stablehlo.constant dense<1.000000e-03> : tensor<f32>
    %125 = stablehlo.broadcast_in_dim %cst_47, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %126 = stablehlo.multiply %125, %124 : tensor<768x768xf32>
    %cst_48 = stablehlo.constant dense<9.990000e-01> : tensor<f32>
    %127 = stablehlo.broadcast_in_dim %cst_48, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %128 = stablehlo.multiply %127, %arg45 : tensor<768x768xf32>
    %129 = stablehlo.add %126, %128 : tensor<768x768xf32>
    %130 = stablehlo.multiply %arg66, %arg66 : tensor<768x768xf32>
    %cst_49 = stablehlo.constant dense<1.000000e-03> : tensor<f32>
    %131 = stablehlo.broadcast_in_dim %cst_49, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %132 = stablehlo.multiply %131, %130 : tensor<768x768xf32>
    %cst_50 = stablehlo.constant dense<9.990000e-01> : tensor<f32>
    %133 = stablehlo.broadcast_in_dim %cst_50, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %134 = stablehlo.multiply %133, %arg46 : tensor<768x768xf32>
    %135 = stablehlo.add %132, %134 : tensor<768x768xf32>
    %136 = stablehlo.multiply %arg67, %arg67 : tensor<768x768xf32>
    %cst_51 = stablehlo.constant dense<1.000000e-03> : tensor<f32>
    %137 = stablehlo.broadcast_in_dim %cst_51, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %138 = stablehlo.multiply %137, %136 : tensor<768x768xf32>
    %cst_52 = stablehlo.constant dense<9.990000e-01> : tensor<f32>
    %139 = stablehlo.broadcast_in_dim %cst_52, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %140 = stablehlo.multiply %139, %arg47 : tensor<768x768xf32>
    %141 = stablehlo.add %138, %140 : tensor<768x768xf32>
    %142 = stablehlo.multiply %arg68, %arg68 : tensor<768x768xf32>
    %cst_53 = stablehlo.constant dense<1.000000e-03> : tensor<f32>
    %143 = stablehlo.broadcast_in_dim %cst_53, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %144 = stablehlo.multiply %143, %142 : tensor<768x768xf32>
    %cst_54 = stablehlo.constant dense<9.990000e-01> : tensor<f32>
    %145 = stablehlo.broadcast_in_dim %cst_54, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %146 = stablehlo.multiply %145, %arg48 : tensor<768x768xf32>
    %147 = stablehlo.add %144, %146 : tensor<768x768xf32>
    %148 = stablehlo.multiply %arg69, %arg69 : tensor<768x768xf32>
    %cst_55 = stablehlo.constant dense<1.000000e-03> : tensor<f32>
    %149 = stablehlo.broadcast_in_dim %cst_55, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %150 = stablehlo.multiply %149, %148 : tensor<768x768xf32>
    %cst_56 = stablehlo.constant dense<9.990000e-01> : tensor<f32>
    %151 = stablehlo.broadcast_in_dim %cst_56, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %152 = stablehlo.multiply %151, %arg49 : tensor<768x768xf32>
    %153 = stablehlo.add %150, %152 : tensor<768x768xf32>
    %154 = stablehlo.multiply %arg70, %arg70 : tensor<768x768xf32>
    %cst_57 = stablehlo.constant dense<1.000000e-03> : tensor<f32>
    %155 = stablehlo.broadcast_in_dim %cst_57, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %156 = stablehlo.multiply %155, %154 : tensor<768x768xf32>
    %cst_58 = stablehlo.constant dense<9.990000e-01> : tensor<f32>
    %157 = stablehlo.broadcast_in_dim %cst_58, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %158 = stablehlo.multiply %157, %arg50 : tensor<768x768xf32>
    %159 = stablehlo.add %156, %158 : tensor<768x768xf32>
    %160 = stablehlo.multiply %arg71, %arg71 : tensor<768x768xf32>
    %cst_59 = stablehlo.constant dense<1.000000e-03> : tensor<f32>
    %161 = stablehlo.broadcast_in_dim %cst_59, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %162 = stablehlo.multiply %161, %160 : tensor<768x768xf32>
    %cst_60 = stablehlo.constant dense<9.990000e-01> : tensor<f32>
    %163 = stablehlo.broadcast_in_dim %cst_60, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %164 = stablehlo.multiply %163, %arg51 : tensor<768x768xf32>
    %165 = stablehlo.add %162, %164 : tensor<768x768xf32>
    %166 = stablehlo.multiply %arg72, %arg72 : tensor<768x768xf32>
    %cst_61 = stablehlo.constant dense<1.000000e-03> : tensor<f32>
    %167 = stablehlo.broadcast_in_dim %cst_61, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %168 = stablehlo.multiply %167, %166 : tensor<768x768xf32>
    %cst_62 = stablehlo.constant dense<9.990000e-01> : tensor<f32>
    %169 = stablehlo.broadcast_in_dim %cst_62, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %170 = stablehlo.multiply %169, %arg52 : tensor<768x768xf32>
    %171 = stablehlo.add %168, %170 : tensor<768x768xf32>
    %172 = stablehlo.multiply %arg73, %arg73 : tensor<768x768xf32>
    %cst_63 = stablehlo.constant dense<1.000000e-03> : tensor<f32>
    %173 = stablehlo.broadcast_in_dim %cst_63, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %174 = stablehlo.multiply %173, %172 : tensor<768x768xf32>
    %cst_64 = stablehlo.constant dense<9.990000e-01> : tensor<f32>
    %175 = stablehlo.broadcast_in_dim %cst_64, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %176 = stablehlo.multiply %175, %arg53 : tensor<768x768xf32>
    %177 = stablehlo.add %174, %176 : tensor<768x768xf32>
    %178 = stablehlo.multiply %arg74, %arg74 : tensor<768x768xf32>
    %cst_65 = stablehlo.constant dense<1.000000e-03> : tensor<f32>
    %179 = stablehlo.broadcast_in_dim %cst_65, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %180 = stablehlo.multiply %179, %178 : tensor<768x768xf32>
    %cst_66 = stablehlo.constant dense<9.990000e-01> : tensor<f32>
    %181 = stablehlo.broadcast_in_dim %cst_66, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %182 = stablehlo.multiply %181, %arg54 : tensor<768x768xf32>
    %183 = stablehlo.add %180, %182 : tensor<768x768xf32>
    %184 = stablehlo.multiply %arg75, %arg75 : tensor<768x768xf32>
    %cst_67 = stablehlo.constant dense<1.000000e-03> : tensor<f32>
    %185 = stablehlo.broadcast_in_dim %cst_67, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %186 = stablehlo.multiply %185, %184 : tensor<768x768xf32>
    %cst_68 = stablehlo.constant dense<9.990000e-01> : tensor<f32>
    %187 = stablehlo.broadcast_in_dim %cst_68, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %188 = stablehlo.multiply %187, %arg55 : tensor<768x768xf32>
    %189 = stablehlo.add %186, %188 : tensor<768x768xf32>
    %190 = stablehlo.multiply %arg76, %arg76 : tensor<768x768xf32>
    %cst_69 = stablehlo.constant dense<1.000000e-03> : tensor<f32>
    %191 = stablehlo.broadcast_in_dim %cst_69, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %192 = stablehlo.multiply %191, %190 : tensor<768x768xf32>
    %cst_70 = stablehlo.constant dense<9.990000e-01> : tensor<f32>
    %193 = stablehlo.broadcast_in_dim %cst_70, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %194 = stablehlo.multiply %193, %arg56 : tensor<768x768xf32>
    %195 = stablehlo.add %192, %194 : tensor<768x768xf32>
    %196 = stablehlo.multiply %arg77, %arg77 : tensor<768x768xf32>
    %cst_71 = stablehlo.constant dense<1.000000e-03> : tensor<f32>
    %197 = stablehlo.broadcast_in_dim %cst_71, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %198 = stablehlo.multiply %197, %196 : tensor<768x768xf32>
    %cst_72 = stablehlo.constant dense<9.990000e-01> : tensor<f32>
    %199 = stablehlo.broadcast_in_dim %cst_72, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %200 = stablehlo.multiply %199, %arg57 : tensor<768x768xf32>
    %201 = stablehlo.add %198, %200 : tensor<768x768xf32>
    %202 = stablehlo.multiply %arg78, %arg78 : tensor<768x768xf32>
    %cst_73 = stablehlo.constant dense<1.000000e-03> : tensor<f32>
    %203 = stablehlo.broadcast_in_dim %cst_73, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %204 = stablehlo.multiply %203, %202 : tensor<768x768xf32>
    %cst_74 = stablehlo.constant dense<9.990000e-01> : tensor<f32>
    %205 = stablehlo.broadcast_in_dim %cst_74, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %206 = stablehlo.multiply %205, %arg58 : tensor<768x768xf32>
    %207 = stablehlo.add %204, %206 : tensor<768x768xf32>
    %208 = stablehlo.multiply %arg79, %arg79 : tensor<768x768xf32>
    %cst_75 = stablehlo.constant dense<1.000000e-03> : tensor<f32>
    %209 = stablehlo.broadcast_in_dim %cst_75, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %210 = stablehlo.multiply %209, %208 : tensor<768x768xf32>
    %cst_76 = stablehlo.constant dense<9.990000e-01> : tensor<f32>
    %211 = stablehlo.broadcast_in_dim %cst_76, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %212 = stablehlo.multiply %211, %arg59 : tensor<768x768xf32>
    %213 = stablehlo.add %210, %212 : tensor<768x768xf32>
    %214 = stablehlo.multiply %arg80, %arg80 : tensor<768x768xf32>
    %cst_77 = stablehlo.constant dense<1.000000e-03> : tensor<f32>
    %215 = stablehlo.broadcast_in_dim %cst_77, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %216 = stablehlo.multiply %215, %214 : tensor<768x768xf32>
    %cst_78 = stablehlo.constant dense<9.990000e-01> : tensor<f32>
    %217 = stablehlo.broadcast_in_dim %cst_78, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %218 = stablehlo.multiply %217, %arg60 : tensor<768x768xf32>
    %219 = stablehlo.add %216, %218 : tensor<768x768xf32>
    %c = stablehlo.constant dense<2147483647> : tensor<i32>
    %220 = stablehlo.compare LT, %arg20, %c, SIGNED : (tensor<i32>, tensor<i32>) -> tensor<i1>
    %c_79 = stablehlo.constant dense<1> : tensor<i32>
    %221 = stablehlo.add %arg20, %c_79 : tensor<i32>
    %c_80 = stablehlo.constant dense<2147483647> : tensor<i32>
    %222 = call @_where(%220, %221, %c_80) : (tensor<i1>, tensor<i32>, tensor<i32>) -> tensor<i32>
    %cst_81 = stablehlo.constant dense<0.899999976> : tensor<f32>
    %223 = stablehlo.convert %222 : (tensor<i32>) -> tensor<f32>
    %224 = stablehlo.power %cst_81, %223 : tensor<f32>
    %cst_82 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %225 = stablehlo.subtract %cst_82, %224 : tensor<f32>
    %226 = stablehlo.broadcast_in_dim %225, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %227 = stablehlo.divide %4, %226 : tensor<768x768xf32>
    %228 = stablehlo.broadcast_in_dim %225, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %229 = stablehlo.divide %9, %228 : tensor<768x768xf32>
    %230 = stablehlo.broadcast_in_dim %225, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %231 = stablehlo.divide %14, %230 : tensor<768x768xf32>
    %232 = stablehlo.broadcast_in_dim %225, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %233 = stablehlo.divide %19, %232 : tensor<768x768xf32>
    %234 = stablehlo.broadcast_in_dim %225, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %235 = stablehlo.divide %24, %234 : tensor<768x768xf32>
    %236 = stablehlo.broadcast_in_dim %225, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %237 = stablehlo.divide %29, %236 : tensor<768x768xf32>
    %238 = stablehlo.broadcast_in_dim %225, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %239 = stablehlo.divide %34, %238 : tensor<768x768xf32>
    %240 = stablehlo.broadcast_in_dim %225, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %241 = stablehlo.divide %39, %240 : tensor<768x768xf32>
    %242 = stablehlo.broadcast_in_dim %225, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %243 = stablehlo.divide %44, %242 : tensor<768x768xf32>
    %244 = stablehlo.broadcast_in_dim %225, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %245 = stablehlo.divide %49, %244 : tensor<768x768xf32>
    %246 = stablehlo.broadcast_in_dim %225, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %247 = stablehlo.divide %54, %246 : tensor<768x768xf32>
    %248 = stablehlo.broadcast_in_dim %225, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %249 = stablehlo.divide %59, %248 : tensor<768x768xf32>
    %250 = stablehlo.broadcast_in_dim %225, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %251 = stablehlo.divide %64, %250 : tensor<768x768xf32>
    %252 = stablehlo.broadcast_in_dim %225, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %253 = stablehlo.divide %69, %252 : tensor<768x768xf32>
    %254 = stablehlo.broadcast_in_dim %225, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %255 = stablehlo.divide %74, %254 : tensor<768x768xf32>
    %256 = stablehlo.broadcast_in_dim %225, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %257 = stablehlo.divide %79, %256 : tensor<768x768xf32>
    %258 = stablehlo.broadcast_in_dim %225, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %259 = stablehlo.divide %84, %258 : tensor<768x768xf32>
    %260 = stablehlo.broadcast_in_dim %225, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %261 = stablehlo.divide %89, %260 : tensor<768x768xf32>
    %262 = stablehlo.broadcast_in_dim %225, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %263 = stablehlo.divide %94, %262 : tensor<768x768xf32>
    %264 = stablehlo.broadcast_in_dim %225, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %265 = stablehlo.divide %99, %264 : tensor<768x768xf32>
    %cst_83 = stablehlo.constant dense<9.990000e-01> : tensor<f32>
    %266 = stablehlo.convert %222 : (tensor<i32>) -> tensor<f32>
    %267 = stablehlo.power %cst_83, %266 : tensor<f32>
    %cst_84 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %268 = stablehlo.subtract %cst_84, %267 : tensor<f32>
    %269 = stablehlo.broadcast_in_dim %268, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %270 = stablehlo.divide %105, %269 : tensor<768x768xf32>
    %271 = stablehlo.broadcast_in_dim %268, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %272 = stablehlo.divide %111, %271 : tensor<768x768xf32>
    %273 = stablehlo.broadcast_in_dim %268, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %274 = stablehlo.divide %117, %273 : tensor<768x768xf32>
    %275 = stablehlo.broadcast_in_dim %268, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %276 = stablehlo.divide %123, %275 : tensor<768x768xf32>
    %277 = stablehlo.broadcast_in_dim %268, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %278 = stablehlo.divide %129, %277 : tensor<768x768xf32>
    %279 = stablehlo.broadcast_in_dim %268, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %280 = stablehlo.divide %135, %279 : tensor<768x768xf32>
    %281 = stablehlo.broadcast_in_dim %268, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %282 = stablehlo.divide %141, %281 : tensor<768x768xf32>
    %283 = stablehlo.broadcast_in_dim %268, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %284 = stablehlo.divide %147, %283 : tensor<768x768xf32>
    %285 = stablehlo.broadcast_in_dim %268, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %286 = stablehlo.divide %153, %285 : tensor<768x768xf32>
    %287 = stablehlo.broadcast_in_dim %268, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %288 = stablehlo.divide %159, %287 : tensor<768x768xf32>
    %289 = stablehlo.broadcast_in_dim %268, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %290 = stablehlo.divide %165, %289 : tensor<768x768xf32>
    %291 = stablehlo.broadcast_in_dim %268, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %292 = stablehlo.divide %171, %291 : tensor<768x768xf32>
    %293 = stablehlo.broadcast_in_dim %268, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %294 = stablehlo.divide %177, %293 : tensor<768x768xf32>
    %295 = stablehlo.broadcast_in_dim %268, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %296 = stablehlo.divide %183, %295 : tensor<768x768xf32>
    %297 = stablehlo.broadcast_in_dim %268, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %298 = stablehlo.divide %189, %297 : tensor<768x768xf32>
    %299 = stablehlo.broadcast_in_dim %268, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %300 = stablehlo.divide %195, %299 : tensor<768x768xf32>
    %301 = stablehlo.broadcast_in_dim %268, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %302 = stablehlo.divide %201, %301 : tensor<768x768xf32>
    %303 = stablehlo.broadcast_in_dim %268, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %304 = stablehlo.divide %207, %303 : tensor<768x768xf32>
    %305 = stablehlo.broadcast_in_dim %268, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %306 = stablehlo.divide %213, %305 : tensor<768x768xf32>
    %307 = stablehlo.broadcast_in_dim %268, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %308 = stablehlo.divide %219, %307 : tensor<768x768xf32>
    %cst_85 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %309 = stablehlo.broadcast_in_dim %cst_85, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %310 = stablehlo.add %270, %309 : tensor<768x768xf32>
    %311 = stablehlo.sqrt %310 : tensor<768x768xf32>
    %cst_86 = stablehlo.constant dense<9.99999997E-7> : tensor<f32>
    %312 = stablehlo.broadcast_in_dim %cst_86, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %313 = stablehlo.add %311, %312 : tensor<768x768xf32>
    %314 = stablehlo.divide %227, %313 : tensor<768x768xf32>
    %cst_87 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %315 = stablehlo.broadcast_in_dim %cst_87, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %316 = stablehlo.add %272, %315 : tensor<768x768xf32>
    %317 = stablehlo.sqrt %316 : tensor<768x768xf32>
    %cst_88 = stablehlo.constant dense<9.99999997E-7> : tensor<f32>
    %318 = stablehlo.broadcast_in_dim %cst_88, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %319 = stablehlo.add %317, %318 : tensor<768x768xf32>
    %320 = stablehlo.divide %229, %319 : tensor<768x768xf32>
    %cst_89 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %321 = stablehlo.broadcast_in_dim %cst_89, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %322 = stablehlo.add %274, %321 : tensor<768x768xf32>
    %323 = stablehlo.sqrt %322 : tensor<768x768xf32>
    %cst_90 = stablehlo.constant dense<9.99999997E-7> : tensor<f32>
    %324 = stablehlo.broadcast_in_dim %cst_90, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %325 = stablehlo.add %323, %324 : tensor<768x768xf32>
    %326 = stablehlo.divide %231, %325 : tensor<768x768xf32>
    %cst_91 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %327 = stablehlo.broadcast_in_dim %cst_91, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %328 = stablehlo.add %276, %327 : tensor<768x768xf32>
    %329 = stablehlo.sqrt %328 : tensor<768x768xf32>
    %cst_92 = stablehlo.constant dense<9.99999997E-7> : tensor<f32>
    %330 = stablehlo.broadcast_in_dim %cst_92, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %331 = stablehlo.add %329, %330 : tensor<768x768xf32>
    %332 = stablehlo.divide %233, %331 : tensor<768x768xf32>
    %cst_93 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %333 = stablehlo.broadcast_in_dim %cst_93, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %334 = stablehlo.add %278, %333 : tensor<768x768xf32>
    %335 = stablehlo.sqrt %334 : tensor<768x768xf32>
    %cst_94 = stablehlo.constant dense<9.99999997E-7> : tensor<f32>
    %336 = stablehlo.broadcast_in_dim %cst_94, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %337 = stablehlo.add %335, %336 : tensor<768x768xf32>
    %338 = stablehlo.divide %235, %337 : tensor<768x768xf32>
    %cst_95 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %339 = stablehlo.broadcast_in_dim %cst_95, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %340 = stablehlo.add %280, %339 : tensor<768x768xf32>
    %341 = stablehlo.sqrt %340 : tensor<768x768xf32>
    %cst_96 = stablehlo.constant dense<9.99999997E-7> : tensor<f32>
    %342 = stablehlo.broadcast_in_dim %cst_96, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %343 = stablehlo.add %341, %342 : tensor<768x768xf32>
    %344 = stablehlo.divide %237, %343 : tensor<768x768xf32>
    %cst_97 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %345 = stablehlo.broadcast_in_dim %cst_97, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %346 = stablehlo.add %282, %345 : tensor<768x768xf32>
    %347 = stablehlo.sqrt %346 : tensor<768x768xf32>
    %cst_98 = stablehlo.constant dense<9.99999997E-7> : tensor<f32>
    %348 = stablehlo.broadcast_in_dim %cst_98, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %349 = stablehlo.add %347, %348 : tensor<768x768xf32>
    %350 = stablehlo.divide %239, %349 : tensor<768x768xf32>
    %cst_99 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %351 = stablehlo.broadcast_in_dim %cst_99, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %352 = stablehlo.add %284, %351 : tensor<768x768xf32>
    %353 = stablehlo.sqrt %352 : tensor<768x768xf32>
    %cst_100 = stablehlo.constant dense<9.99999997E-7> : tensor<f32>
    %354 = stablehlo.broadcast_in_dim %cst_100, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %355 = stablehlo.add %353, %354 : tensor<768x768xf32>
    %356 = stablehlo.divide %241, %355 : tensor<768x768xf32>
    %cst_101 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %357 = stablehlo.broadcast_in_dim %cst_101, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %358 = stablehlo.add %286, %357 : tensor<768x768xf32>
    %359 = stablehlo.sqrt %358 : tensor<768x768xf32>
    %cst_102 = stablehlo.constant dense<9.99999997E-7> : tensor<f32>
    %360 = stablehlo.broadcast_in_dim %cst_102, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %361 = stablehlo.add %359, %360 : tensor<768x768xf32>
    %362 = stablehlo.divide %243, %361 : tensor<768x768xf32>
    %cst_103 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %363 = stablehlo.broadcast_in_dim %cst_103, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %364 = stablehlo.add %288, %363 : tensor<768x768xf32>
    %365 = stablehlo.sqrt %364 : tensor<768x768xf32>
    %cst_104 = stablehlo.constant dense<9.99999997E-7> : tensor<f32>
    %366 = stablehlo.broadcast_in_dim %cst_104, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %367 = stablehlo.add %365, %366 : tensor<768x768xf32>
    %368 = stablehlo.divide %245, %367 : tensor<768x768xf32>
    %cst_105 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %369 = stablehlo.broadcast_in_dim %cst_105, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %370 = stablehlo.add %290, %369 : tensor<768x768xf32>
    %371 = stablehlo.sqrt %370 : tensor<768x768xf32>
    %cst_106 = stablehlo.constant dense<9.99999997E-7> : tensor<f32>
    %372 = stablehlo.broadcast_in_dim %cst_106, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %373 = stablehlo.add %371, %372 : tensor<768x768xf32>
    %374 = stablehlo.divide %247, %373 : tensor<768x768xf32>
    %cst_107 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %375 = stablehlo.broadcast_in_dim %cst_107, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %376 = stablehlo.add %292, %375 : tensor<768x768xf32>
    %377 = stablehlo.sqrt %376 : tensor<768x768xf32>
    %cst_108 = stablehlo.constant dense<9.99999997E-7> : tensor<f32>
    %378 = stablehlo.broadcast_in_dim %cst_108, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %379 = stablehlo.add %377, %378 : tensor<768x768xf32>
    %380 = stablehlo.divide %249, %379 : tensor<768x768xf32>
    %cst_109 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %381 = stablehlo.broadcast_in_dim %cst_109, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %382 = stablehlo.add %294, %381 : tensor<768x768xf32>
    %383 = stablehlo.sqrt %382 : tensor<768x768xf32>
    %cst_110 = stablehlo.constant dense<9.99999997E-7> : tensor<f32>
    %384 = stablehlo.broadcast_in_dim %cst_110, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %385 = stablehlo.add %383, %384 : tensor<768x768xf32>
    %386 = stablehlo.divide %251, %385 : tensor<768x768xf32>
    %cst_111 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %387 = stablehlo.broadcast_in_dim %cst_111, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %388 = stablehlo.add %296, %387 : tensor<768x768xf32>
    %389 = stablehlo.sqrt %388 : tensor<768x768xf32>
    %cst_112 = stablehlo.constant dense<9.99999997E-7> : tensor<f32>
    %390 = stablehlo.broadcast_in_dim %cst_112, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %391 = stablehlo.add %389, %390 : tensor<768x768xf32>
    %392 = stablehlo.divide %253, %391 : tensor<768x768xf32>
    %cst_113 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %393 = stablehlo.broadcast_in_dim %cst_113, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %394 = stablehlo.add %298, %393 : tensor<768x768xf32>
    %395 = stablehlo.sqrt %394 : tensor<768x768xf32>
    %cst_114 = stablehlo.constant dense<9.99999997E-7> : tensor<f32>
    %396 = stablehlo.broadcast_in_dim %cst_114, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %397 = stablehlo.add %395, %396 : tensor<768x768xf32>
    %398 = stablehlo.divide %255, %397 : tensor<768x768xf32>
    %cst_115 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %399 = stablehlo.broadcast_in_dim %cst_115, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %400 = stablehlo.add %300, %399 : tensor<768x768xf32>
    %401 = stablehlo.sqrt %400 : tensor<768x768xf32>
    %cst_116 = stablehlo.constant dense<9.99999997E-7> : tensor<f32>
    %402 = stablehlo.broadcast_in_dim %cst_116, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %403 = stablehlo.add %401, %402 : tensor<768x768xf32>
    %404 = stablehlo.divide %257, %403 : tensor<768x768xf32>
    %cst_117 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %405 = stablehlo.broadcast_in_dim %cst_117, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %406 = stablehlo.add %302, %405 : tensor<768x768xf32>
    %407 = stablehlo.sqrt %406 : tensor<768x768xf32>
    %cst_118 = stablehlo.constant dense<9.99999997E-7> : tensor<f32>
    %408 = stablehlo.broadcast_in_dim %cst_118, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %409 = stablehlo.add %407, %408 : tensor<768x768xf32>
    %410 = stablehlo.divide %259, %409 : tensor<768x768xf32>
    %cst_119 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %411 = stablehlo.broadcast_in_dim %cst_119, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %412 = stablehlo.add %304, %411 : tensor<768x768xf32>
    %413 = stablehlo.sqrt %412 : tensor<768x768xf32>
    %cst_120 = stablehlo.constant dense<9.99999997E-7> : tensor<f32>
    %414 = stablehlo.broadcast_in_dim %cst_120, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %415 = stablehlo.add %413, %414 : tensor<768x768xf32>
    %416 = stablehlo.divide %261, %415 : tensor<768x768xf32>
    %cst_121 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %417 = stablehlo.broadcast_in_dim %cst_121, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %418 = stablehlo.add %306, %417 : tensor<768x768xf32>
    %419 = stablehlo.sqrt %418 : tensor<768x768xf32>
    %cst_122 = stablehlo.constant dense<9.99999997E-7> : tensor<f32>
    %420 = stablehlo.broadcast_in_dim %cst_122, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %421 = stablehlo.add %419, %420 : tensor<768x768xf32>
    %422 = stablehlo.divide %263, %421 : tensor<768x768xf32>
    %cst_123 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %423 = stablehlo.broadcast_in_dim %cst_123, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %424 = stablehlo.add %308, %423 : tensor<768x768xf32>
    %425 = stablehlo.sqrt %424 : tensor<768x768xf32>
    %cst_124 = stablehlo.constant dense<9.99999997E-7> : tensor<f32>
    %426 = stablehlo.broadcast_in_dim %cst_124, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %427 = stablehlo.add %425, %426 : tensor<768x768xf32>
    %428 = stablehlo.divide %265, %427 : tensor<768x768xf32>
    %429 = call @norm(%arg0) : (tensor<768x768xf32>) -> tensor<1x1xf32>
    %cst_125 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %430 = stablehlo.broadcast_in_dim %cst_125, dims = [] : (tensor<f32>) -> tensor<1x1xf32>
    %431 = stablehlo.compare LE, %429, %430, FLOAT : (tensor<1x1xf32>, tensor<1x1xf32>) -> tensor<1x1xi1>
    %cst_126 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %432 = stablehlo.broadcast_in_dim %cst_126, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %433 = call @_where_0(%431, %432, %arg0) : (tensor<1x1xi1>, tensor<768x768xf32>, tensor<768x768xf32>) -> tensor<768x768xf32>
    %434 = stablehlo.reshape %429 : (tensor<1x1xf32>) -> tensor<f32>
    %435 = call @norm_1(%433) : (tensor<768x768xf32>) -> tensor<f32>
    %cst_127 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %436 = stablehlo.compare LE, %434, %cst_127, FLOAT : (tensor<f32>, tensor<f32>) -> tensor<i1>
    %cst_128 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %437 = call @_where_2(%436, %cst_128, %435) : (tensor<i1>, tensor<f32>, tensor<f32>) -> tensor<f32>
    %438 = call @norm(%314) : (tensor<768x768xf32>) -> tensor<1x1xf32>
    %cst_129 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %439 = stablehlo.broadcast_in_dim %cst_129, dims = [] : (tensor<f32>) -> tensor<1x1xf32>
    %440 = stablehlo.compare LE, %438, %439, FLOAT : (tensor<1x1xf32>, tensor<1x1xf32>) -> tensor<1x1xi1>
    %cst_130 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %441 = stablehlo.broadcast_in_dim %cst_130, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %442 = call @_where_0(%440, %441, %314) : (tensor<1x1xi1>, tensor<768x768xf32>, tensor<768x768xf32>) -> tensor<768x768xf32>
    %443 = stablehlo.reshape %438 : (tensor<1x1xf32>) -> tensor<f32>
    %444 = call @norm_1(%442) : (tensor<768x768xf32>) -> tensor<f32>
    %cst_131 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %445 = stablehlo.compare LE, %443, %cst_131, FLOAT : (tensor<f32>, tensor<f32>) -> tensor<i1>
    %cst_132 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %446 = call @_where_2(%445, %cst_132, %444) : (tensor<i1>, tensor<f32>, tensor<f32>) -> tensor<f32>
    %cst_133 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %447 = stablehlo.multiply %cst_133, %437 : tensor<f32>
    %cst_134 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %448 = stablehlo.add %446, %cst_134 : tensor<f32>
    %449 = stablehlo.divide %447, %448 : tensor<f32>
    %cst_135 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %450 = stablehlo.compare EQ, %437, %cst_135, FLOAT : (tensor<f32>, tensor<f32>) -> tensor<i1>
    %cst_136 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %451 = stablehlo.compare EQ, %446, %cst_136, FLOAT : (tensor<f32>, tensor<f32>) -> tensor<i1>
    %452 = stablehlo.or %450, %451 : tensor<i1>
    %cst_137 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %453 = call @_where_3(%452, %cst_137, %449) : (tensor<i1>, tensor<f32>, tensor<f32>) -> tensor<f32>
    %454 = stablehlo.broadcast_in_dim %453, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %455 = stablehlo.multiply %314, %454 : tensor<768x768xf32>
    %456 = call @norm(%arg1) : (tensor<768x768xf32>) -> tensor<1x1xf32>
    %cst_138 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %457 = stablehlo.broadcast_in_dim %cst_138, dims = [] : (tensor<f32>) -> tensor<1x1xf32>
    %458 = stablehlo.compare LE, %456, %457, FLOAT : (tensor<1x1xf32>, tensor<1x1xf32>) -> tensor<1x1xi1>
    %cst_139 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %459 = stablehlo.broadcast_in_dim %cst_139, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %460 = call @_where_0(%458, %459, %arg1) : (tensor<1x1xi1>, tensor<768x768xf32>, tensor<768x768xf32>) -> tensor<768x768xf32>
    %461 = stablehlo.reshape %456 : (tensor<1x1xf32>) -> tensor<f32>
    %462 = call @norm_1(%460) : (tensor<768x768xf32>) -> tensor<f32>
    %cst_140 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %463 = stablehlo.compare LE, %461, %cst_140, FLOAT : (tensor<f32>, tensor<f32>) -> tensor<i1>
    %cst_141 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %464 = call @_where_2(%463, %cst_141, %462) : (tensor<i1>, tensor<f32>, tensor<f32>) -> tensor<f32>
    %465 = call @norm(%320) : (tensor<768x768xf32>) -> tensor<1x1xf32>
    %cst_142 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %466 = stablehlo.broadcast_in_dim %cst_142, dims = [] : (tensor<f32>) -> tensor<1x1xf32>
    %467 = stablehlo.compare LE, %465, %466, FLOAT : (tensor<1x1xf32>, tensor<1x1xf32>) -> tensor<1x1xi1>
    %cst_143 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %468 = stablehlo.broadcast_in_dim %cst_143, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %469 = call @_where_0(%467, %468, %320) : (tensor<1x1xi1>, tensor<768x768xf32>, tensor<768x768xf32>) -> tensor<768x768xf32>
    %470 = stablehlo.reshape %465 : (tensor<1x1xf32>) -> tensor<f32>
    %471 = call @norm_1(%469) : (tensor<768x768xf32>) -> tensor<f32>
    %cst_144 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %472 = stablehlo.compare LE, %470, %cst_144, FLOAT : (tensor<f32>, tensor<f32>) -> tensor<i1>
    %cst_145 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %473 = call @_where_2(%472, %cst_145, %471) : (tensor<i1>, tensor<f32>, tensor<f32>) -> tensor<f32>
    %cst_146 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %474 = stablehlo.multiply %cst_146, %464 : tensor<f32>
    %cst_147 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %475 = stablehlo.add %473, %cst_147 : tensor<f32>
    %476 = stablehlo.divide %474, %475 : tensor<f32>
    %cst_148 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %477 = stablehlo.compare EQ, %464, %cst_148, FLOAT : (tensor<f32>, tensor<f32>) -> tensor<i1>
    %cst_149 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %478 = stablehlo.compare EQ, %473, %cst_149, FLOAT : (tensor<f32>, tensor<f32>) -> tensor<i1>
    %479 = stablehlo.or %477, %478 : tensor<i1>
    %cst_150 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %480 = call @_where_3(%479, %cst_150, %476) : (tensor<i1>, tensor<f32>, tensor<f32>) -> tensor<f32>
    %481 = stablehlo.broadcast_in_dim %480, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %482 = stablehlo.multiply %320, %481 : tensor<768x768xf32>
    %483 = call @norm(%arg2) : (tensor<768x768xf32>) -> tensor<1x1xf32>
    %cst_151 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %484 = stablehlo.broadcast_in_dim %cst_151, dims = [] : (tensor<f32>) -> tensor<1x1xf32>
    %485 = stablehlo.compare LE, %483, %484, FLOAT : (tensor<1x1xf32>, tensor<1x1xf32>) -> tensor<1x1xi1>
    %cst_152 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %486 = stablehlo.broadcast_in_dim %cst_152, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %487 = call @_where_0(%485, %486, %arg2) : (tensor<1x1xi1>, tensor<768x768xf32>, tensor<768x768xf32>) -> tensor<768x768xf32>
    %488 = stablehlo.reshape %483 : (tensor<1x1xf32>) -> tensor<f32>
    %489 = call @norm_1(%487) : (tensor<768x768xf32>) -> tensor<f32>
    %cst_153 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %490 = stablehlo.compare LE, %488, %cst_153, FLOAT : (tensor<f32>, tensor<f32>) -> tensor<i1>
    %cst_154 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %491 = call @_where_2(%490, %cst_154, %489) : (tensor<i1>, tensor<f32>, tensor<f32>) -> tensor<f32>
    %492 = call @norm(%326) : (tensor<768x768xf32>) -> tensor<1x1xf32>
    %cst_155 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %493 = stablehlo.broadcast_in_dim %cst_155, dims = [] : (tensor<f32>) -> tensor<1x1xf32>
    %494 = stablehlo.compare LE, %492, %493, FLOAT : (tensor<1x1xf32>, tensor<1x1xf32>) -> tensor<1x1xi1>
    %cst_156 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %495 = stablehlo.broadcast_in_dim %cst_156, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %496 = call @_where_0(%494, %495, %326) : (tensor<1x1xi1>, tensor<768x768xf32>, tensor<768x768xf32>) -> tensor<768x768xf32>
    %497 = stablehlo.reshape %492 : (tensor<1x1xf32>) -> tensor<f32>
    %498 = call @norm_1(%496) : (tensor<768x768xf32>) -> tensor<f32>
    %cst_157 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %499 = stablehlo.compare LE, %497, %cst_157, FLOAT : (tensor<f32>, tensor<f32>) -> tensor<i1>
    %cst_158 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %500 = call @_where_2(%499, %cst_158, %498) : (tensor<i1>, tensor<f32>, tensor<f32>) -> tensor<f32>
    %cst_159 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %501 = stablehlo.multiply %cst_159, %491 : tensor<f32>
    %cst_160 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %502 = stablehlo.add %500, %cst_160 : tensor<f32>
    %503 = stablehlo.divide %501, %502 : tensor<f32>
    %cst_161 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %504 = stablehlo.compare EQ, %491, %cst_161, FLOAT : (tensor<f32>, tensor<f32>) -> tensor<i1>
    %cst_162 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %505 = stablehlo.compare EQ, %500, %cst_162, FLOAT : (tensor<f32>, tensor<f32>) -> tensor<i1>
    %506 = stablehlo.or %504, %505 : tensor<i1>
    %cst_163 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %507 = call @_where_3(%506, %cst_163, %503) : (tensor<i1>, tensor<f32>, tensor<f32>) -> tensor<f32>
    %508 = stablehlo.broadcast_in_dim %507, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %509 = stablehlo.multiply %326, %508 : tensor<768x768xf32>
    %510 = call @norm(%arg3) : (tensor<768x768xf32>) -> tensor<1x1xf32>
    %cst_164 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %511 = stablehlo.broadcast_in_dim %cst_164, dims = [] : (tensor<f32>) -> tensor<1x1xf32>
    %512 = stablehlo.compare LE, %510, %511, FLOAT : (tensor<1x1xf32>, tensor<1x1xf32>) -> tensor<1x1xi1>
    %cst_165 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %513 = stablehlo.broadcast_in_dim %cst_165, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %514 = call @_where_0(%512, %513, %arg3) : (tensor<1x1xi1>, tensor<768x768xf32>, tensor<768x768xf32>) -> tensor<768x768xf32>
    %515 = stablehlo.reshape %510 : (tensor<1x1xf32>) -> tensor<f32>
    %516 = call @norm_1(%514) : (tensor<768x768xf32>) -> tensor<f32>
    %cst_166 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %517 = stablehlo.compare LE, %515, %cst_166, FLOAT : (tensor<f32>, tensor<f32>) -> tensor<i1>
    %cst_167 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %518 = call @_where_2(%517, %cst_167, %516) : (tensor<i1>, tensor<f32>, tensor<f32>) -> tensor<f32>
    %519 = call @norm(%332) : (tensor<768x768xf32>) -> tensor<1x1xf32>
    %cst_168 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %520 = stablehlo.broadcast_in_dim %cst_168, dims = [] : (tensor<f32>) -> tensor<1x1xf32>
    %521 = stablehlo.compare LE, %519, %520, FLOAT : (tensor<1x1xf32>, tensor<1x1xf32>) -> tensor<1x1xi1>
    %cst_169 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %522 = stablehlo.broadcast_in_dim %cst_169, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %523 = call @_where_0(%521, %522, %332) : (tensor<1x1xi1>, tensor<768x768xf32>, tensor<768x768xf32>) -> tensor<768x768xf32>
    %524 = stablehlo.reshape %519 : (tensor<1x1xf32>) -> tensor<f32>
    %525 = call @norm_1(%523) : (tensor<768x768xf32>) -> tensor<f32>
    %cst_170 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %526 = stablehlo.compare LE, %524, %cst_170, FLOAT : (tensor<f32>, tensor<f32>) -> tensor<i1>
    %cst_171 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %527 = call @_where_2(%526, %cst_171, %525) : (tensor<i1>, tensor<f32>, tensor<f32>) -> tensor<f32>
    %cst_172 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %528 = stablehlo.multiply %cst_172, %518 : tensor<f32>
    %cst_173 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %529 = stablehlo.add %527, %cst_173 : tensor<f32>
    %530 = stablehlo.divide %528, %529 : tensor<f32>
    %cst_174 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %531 = stablehlo.compare EQ, %518, %cst_174, FLOAT : (tensor<f32>, tensor<f32>) -> tensor<i1>
    %cst_175 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %532 = stablehlo.compare EQ, %527, %cst_175, FLOAT : (tensor<f32>, tensor<f32>) -> tensor<i1>
    %533 = stablehlo.or %531, %532 : tensor<i1>
    %cst_176 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %534 = call @_where_3(%533, %cst_176, %530) : (tensor<i1>, tensor<f32>, tensor<f32>) -> tensor<f32>
    %535 = stablehlo.broadcast_in_dim %534, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %536 = stablehlo.multiply %332, %535 : tensor<768x768xf32>
    %537 = call @norm(%arg4) : (tensor<768x768xf32>) -> tensor<1x1xf32>
    %cst_177 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %538 = stablehlo.broadcast_in_dim %cst_177, dims = [] : (tensor<f32>) -> tensor<1x1xf32>
    %539 = stablehlo.compare LE, %537, %538, FLOAT : (tensor<1x1xf32>, tensor<1x1xf32>) -> tensor<1x1xi1>
    %cst_178 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %540 = stablehlo.broadcast_in_dim %cst_178, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %541 = call @_where_0(%539, %540, %arg4) : (tensor<1x1xi1>, tensor<768x768xf32>, tensor<768x768xf32>) -> tensor<768x768xf32>
    %542 = stablehlo.reshape %537 : (tensor<1x1xf32>) -> tensor<f32>
    %543 = call @norm_1(%541) : (tensor<768x768xf32>) -> tensor<f32>
    %cst_179 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %544 = stablehlo.compare LE, %542, %cst_179, FLOAT : (tensor<f32>, tensor<f32>) -> tensor<i1>
    %cst_180 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %545 = call @_where_2(%544, %cst_180, %543) : (tensor<i1>, tensor<f32>, tensor<f32>) -> tensor<f32>
    %546 = call @norm(%338) : (tensor<768x768xf32>) -> tensor<1x1xf32>
    %cst_181 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %547 = stablehlo.broadcast_in_dim %cst_181, dims = [] : (tensor<f32>) -> tensor<1x1xf32>
    %548 = stablehlo.compare LE, %546, %547, FLOAT : (tensor<1x1xf32>, tensor<1x1xf32>) -> tensor<1x1xi1>
    %cst_182 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %549 = stablehlo.broadcast_in_dim %cst_182, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %550 = call @_where_0(%548, %549, %338) : (tensor<1x1xi1>, tensor<768x768xf32>, tensor<768x768xf32>) -> tensor<768x768xf32>
    %551 = stablehlo.reshape %546 : (tensor<1x1xf32>) -> tensor<f32>
    %552 = call @norm_1(%550) : (tensor<768x768xf32>) -> tensor<f32>
    %cst_183 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %553 = stablehlo.compare LE, %551, %cst_183, FLOAT : (tensor<f32>, tensor<f32>) -> tensor<i1>
    %cst_184 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %554 = call @_where_2(%553, %cst_184, %552) : (tensor<i1>, tensor<f32>, tensor<f32>) -> tensor<f32>
    %cst_185 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %555 = stablehlo.multiply %cst_185, %545 : tensor<f32>
    %cst_186 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %556 = stablehlo.add %554, %cst_186 : tensor<f32>
    %557 = stablehlo.divide %555, %556 : tensor<f32>
    %cst_187 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %558 = stablehlo.compare EQ, %545, %cst_187, FLOAT : (tensor<f32>, tensor<f32>) -> tensor<i1>
    %cst_188 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %559 = stablehlo.compare EQ, %554, %cst_188, FLOAT : (tensor<f32>, tensor<f32>) -> tensor<i1>
    %560 = stablehlo.or %558, %559 : tensor<i1>
    %cst_189 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %561 = call @_where_3(%560, %cst_189, %557) : (tensor<i1>, tensor<f32>, tensor<f32>) -> tensor<f32>
    %562 = stablehlo.broadcast_in_dim %561, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %563 = stablehlo.multiply %338, %562 : tensor<768x768xf32>
    %564 = call @norm(%arg5) : (tensor<768x768xf32>) -> tensor<1x1xf32>
    %cst_190 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %565 = stablehlo.broadcast_in_dim %cst_190, dims = [] : (tensor<f32>) -> tensor<1x1xf32>
    %566 = stablehlo.compare LE, %564, %565, FLOAT : (tensor<1x1xf32>, tensor<1x1xf32>) -> tensor<1x1xi1>
    %cst_191 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %567 = stablehlo.broadcast_in_dim %cst_191, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %568 = call @_where_0(%566, %567, %arg5) : (tensor<1x1xi1>, tensor<768x768xf32>, tensor<768x768xf32>) -> tensor<768x768xf32>
    %569 = stablehlo.reshape %564 : (tensor<1x1xf32>) -> tensor<f32>
    %570 = call @norm_1(%568) : (tensor<768x768xf32>) -> tensor<f32>
    %cst_192 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %571 = stablehlo.compare LE, %569, %cst_192, FLOAT : (tensor<f32>, tensor<f32>) -> tensor<i1>
    %cst_193 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %572 = call @_where_2(%571, %cst_193, %570) : (tensor<i1>, tensor<f32>, tensor<f32>) -> tensor<f32>
    %573 = call @norm(%344) : (tensor<768x768xf32>) -> tensor<1x1xf32>
    %cst_194 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %574 = stablehlo.broadcast_in_dim %cst_194, dims = [] : (tensor<f32>) -> tensor<1x1xf32>
    %575 = stablehlo.compare LE, %573, %574, FLOAT : (tensor<1x1xf32>, tensor<1x1xf32>) -> tensor<1x1xi1>
    %cst_195 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %576 = stablehlo.broadcast_in_dim %cst_195, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %577 = call @_where_0(%575, %576, %344) : (tensor<1x1xi1>, tensor<768x768xf32>, tensor<768x768xf32>) -> tensor<768x768xf32>
    %578 = stablehlo.reshape %573 : (tensor<1x1xf32>) -> tensor<f32>
    %579 = call @norm_1(%577) : (tensor<768x768xf32>) -> tensor<f32>
    %cst_196 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %580 = stablehlo.compare LE, %578, %cst_196, FLOAT : (tensor<f32>, tensor<f32>) -> tensor<i1>
    %cst_197 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %581 = call @_where_2(%580, %cst_197, %579) : (tensor<i1>, tensor<f32>, tensor<f32>) -> tensor<f32>
    %cst_198 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %582 = stablehlo.multiply %cst_198, %572 : tensor<f32>
    %cst_199 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %583 = stablehlo.add %581, %cst_199 : tensor<f32>
    %584 = stablehlo.divide %582, %583 : tensor<f32>
    %cst_200 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %585 = stablehlo.compare EQ, %572, %cst_200, FLOAT : (tensor<f32>, tensor<f32>) -> tensor<i1>
    %cst_201 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %586 = stablehlo.compare EQ, %581, %cst_201, FLOAT : (tensor<f32>, tensor<f32>) -> tensor<i1>
    %587 = stablehlo.or %585, %586 : tensor<i1>
    %cst_202 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %588 = call @_where_3(%587, %cst_202, %584) : (tensor<i1>, tensor<f32>, tensor<f32>) -> tensor<f32>
    %589 = stablehlo.broadcast_in_dim %588, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %590 = stablehlo.multiply %344, %589 : tensor<768x768xf32>
    %591 = call @norm(%arg6) : (tensor<768x768xf32>) -> tensor<1x1xf32>
    %cst_203 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %592 = stablehlo.broadcast_in_dim %cst_203, dims = [] : (tensor<f32>) -> tensor<1x1xf32>
    %593 = stablehlo.compare LE, %591, %592, FLOAT : (tensor<1x1xf32>, tensor<1x1xf32>) -> tensor<1x1xi1>
    %cst_204 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %594 = stablehlo.broadcast_in_dim %cst_204, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %595 = call @_where_0(%593, %594, %arg6) : (tensor<1x1xi1>, tensor<768x768xf32>, tensor<768x768xf32>) -> tensor<768x768xf32>
    %596 = stablehlo.reshape %591 : (tensor<1x1xf32>) -> tensor<f32>
    %597 = call @norm_1(%595) : (tensor<768x768xf32>) -> tensor<f32>
    %cst_205 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %598 = stablehlo.compare LE, %596, %cst_205, FLOAT : (tensor<f32>, tensor<f32>) -> tensor<i1>
    %cst_206 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %599 = call @_where_2(%598, %cst_206, %597) : (tensor<i1>, tensor<f32>, tensor<f32>) -> tensor<f32>
    %600 = call @norm(%350) : (tensor<768x768xf32>) -> tensor<1x1xf32>
    %cst_207 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %601 = stablehlo.broadcast_in_dim %cst_207, dims = [] : (tensor<f32>) -> tensor<1x1xf32>
    %602 = stablehlo.compare LE, %600, %601, FLOAT : (tensor<1x1xf32>, tensor<1x1xf32>) -> tensor<1x1xi1>
    %cst_208 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %603 = stablehlo.broadcast_in_dim %cst_208, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %604 = call @_where_0(%602, %603, %350) : (tensor<1x1xi1>, tensor<768x768xf32>, tensor<768x768xf32>) -> tensor<768x768xf32>
    %605 = stablehlo.reshape %600 : (tensor<1x1xf32>) -> tensor<f32>
    %606 = call @norm_1(%604) : (tensor<768x768xf32>) -> tensor<f32>
    %cst_209 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %607 = stablehlo.compare LE, %605, %cst_209, FLOAT : (tensor<f32>, tensor<f32>) -> tensor<i1>
    %cst_210 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %608 = call @_where_2(%607, %cst_210, %606) : (tensor<i1>, tensor<f32>, tensor<f32>) -> tensor<f32>
    %cst_211 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %609 = stablehlo.multiply %cst_211, %599 : tensor<f32>
    %cst_212 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %610 = stablehlo.add %608, %cst_212 : tensor<f32>
    %611 = stablehlo.divide %609, %610 : tensor<f32>
    %cst_213 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %612 = stablehlo.compare EQ, %599, %cst_213, FLOAT : (tensor<f32>, tensor<f32>) -> tensor<i1>
    %cst_214 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %613 = stablehlo.compare EQ, %608, %cst_214, FLOAT : (tensor<f32>, tensor<f32>) -> tensor<i1>
    %614 = stablehlo.or %612, %613 : tensor<i1>
    %cst_215 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %615 = call @_where_3(%614, %cst_215, %611) : (tensor<i1>, tensor<f32>, tensor<f32>) -> tensor<f32>
    %616 = stablehlo.broadcast_in_dim %615, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %617 = stablehlo.multiply %350, %616 : tensor<768x768xf32>
    %618 = call @norm(%arg7) : (tensor<768x768xf32>) -> tensor<1x1xf32>
    %cst_216 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %619 = stablehlo.broadcast_in_dim %cst_216, dims = [] : (tensor<f32>) -> tensor<1x1xf32>
    %620 = stablehlo.compare LE, %618, %619, FLOAT : (tensor<1x1xf32>, tensor<1x1xf32>) -> tensor<1x1xi1>
    %cst_217 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %621 = stablehlo.broadcast_in_dim %cst_217, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %622 = call @_where_0(%620, %621, %arg7) : (tensor<1x1xi1>, tensor<768x768xf32>, tensor<768x768xf32>) -> tensor<768x768xf32>
    %623 = stablehlo.reshape %618 : (tensor<1x1xf32>) -> tensor<f32>
    %624 = call @norm_1(%622) : (tensor<768x768xf32>) -> tensor<f32>
    %cst_218 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %625 = stablehlo.compare LE, %623, %cst_218, FLOAT : (tensor<f32>, tensor<f32>) -> tensor<i1>
    %cst_219 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %626 = call @_where_2(%625, %cst_219, %624) : (tensor<i1>, tensor<f32>, tensor<f32>) -> tensor<f32>
    %627 = call @norm(%356) : (tensor<768x768xf32>) -> tensor<1x1xf32>
    %cst_220 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %628 = stablehlo.broadcast_in_dim %cst_220, dims = [] : (tensor<f32>) -> tensor<1x1xf32>
    %629 = stablehlo.compare LE, %627, %628, FLOAT : (tensor<1x1xf32>, tensor<1x1xf32>) -> tensor<1x1xi1>
    %cst_221 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %630 = stablehlo.broadcast_in_dim %cst_221, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %631 = call @_where_0(%629, %630, %356) : (tensor<1x1xi1>, tensor<768x768xf32>, tensor<768x768xf32>) -> tensor<768x768xf32>
    %632 = stablehlo.reshape %627 : (tensor<1x1xf32>) -> tensor<f32>
    %633 = call @norm_1(%631) : (tensor<768x768xf32>) -> tensor<f32>
    %cst_222 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %634 = stablehlo.compare LE, %632, %cst_222, FLOAT : (tensor<f32>, tensor<f32>) -> tensor<i1>
    %cst_223 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %635 = call @_where_2(%634, %cst_223, %633) : (tensor<i1>, tensor<f32>, tensor<f32>) -> tensor<f32>
    %cst_224 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %636 = stablehlo.multiply %cst_224, %626 : tensor<f32>
    %cst_225 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %637 = stablehlo.add %635, %cst_225 : tensor<f32>
    %638 = stablehlo.divide %636, %637 : tensor<f32>
    %cst_226 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %639 = stablehlo.compare EQ, %626, %cst_226, FLOAT : (tensor<f32>, tensor<f32>) -> tensor<i1>
    %cst_227 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %640 = stablehlo.compare EQ, %635, %cst_227, FLOAT : (tensor<f32>, tensor<f32>) -> tensor<i1>
    %641 = stablehlo.or %639, %640 : tensor<i1>
    %cst_228 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %642 = call @_where_3(%641, %cst_228, %638) : (tensor<i1>, tensor<f32>, tensor<f32>) -> tensor<f32>
    %643 = stablehlo.broadcast_in_dim %642, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %644 = stablehlo.multiply %356, %643 : tensor<768x768xf32>
    %645 = call @norm(%arg8) : (tensor<768x768xf32>) -> tensor<1x1xf32>
    %cst_229 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %646 = stablehlo.broadcast_in_dim %cst_229, dims = [] : (tensor<f32>) -> tensor<1x1xf32>
    %647 = stablehlo.compare LE, %645, %646, FLOAT : (tensor<1x1xf32>, tensor<1x1xf32>) -> tensor<1x1xi1>
    %cst_230 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %648 = stablehlo.broadcast_in_dim %cst_230, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %649 = call @_where_0(%647, %648, %arg8) : (tensor<1x1xi1>, tensor<768x768xf32>, tensor<768x768xf32>) -> tensor<768x768xf32>
    %650 = stablehlo.reshape %645 : (tensor<1x1xf32>) -> tensor<f32>
    %651 = call @norm_1(%649) : (tensor<768x768xf32>) -> tensor<f32>
    %cst_231 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %652 = stablehlo.compare LE, %650, %cst_231, FLOAT : (tensor<f32>, tensor<f32>) -> tensor<i1>
    %cst_232 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %653 = call @_where_2(%652, %cst_232, %651) : (tensor<i1>, tensor<f32>, tensor<f32>) -> tensor<f32>
    %654 = call @norm(%362) : (tensor<768x768xf32>) -> tensor<1x1xf32>
    %cst_233 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %655 = stablehlo.broadcast_in_dim %cst_233, dims = [] : (tensor<f32>) -> tensor<1x1xf32>
    %656 = stablehlo.compare LE, %654, %655, FLOAT : (tensor<1x1xf32>, tensor<1x1xf32>) -> tensor<1x1xi1>
    %cst_234 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %657 = stablehlo.broadcast_in_dim %cst_234, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %658 = call @_where_0(%656, %657, %362) : (tensor<1x1xi1>, tensor<768x768xf32>, tensor<768x768xf32>) -> tensor<768x768xf32>
    %659 = stablehlo.reshape %654 : (tensor<1x1xf32>) -> tensor<f32>
    %660 = call @norm_1(%658) : (tensor<768x768xf32>) -> tensor<f32>
    %cst_235 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %661 = stablehlo.compare LE, %659, %cst_235, FLOAT : (tensor<f32>, tensor<f32>) -> tensor<i1>
    %cst_236 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %662 = call @_where_2(%661, %cst_236, %660) : (tensor<i1>, tensor<f32>, tensor<f32>) -> tensor<f32>
    %cst_237 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %663 = stablehlo.multiply %cst_237, %653 : tensor<f32>
    %cst_238 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %664 = stablehlo.add %662, %cst_238 : tensor<f32>
    %665 = stablehlo.divide %663, %664 : tensor<f32>
    %cst_239 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %666 = stablehlo.compare EQ, %653, %cst_239, FLOAT : (tensor<f32>, tensor<f32>) -> tensor<i1>
    %cst_240 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %667 = stablehlo.compare EQ, %662, %cst_240, FLOAT : (tensor<f32>, tensor<f32>) -> tensor<i1>
    %668 = stablehlo.or %666, %667 : tensor<i1>
    %cst_241 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %669 = call @_where_3(%668, %cst_241, %665) : (tensor<i1>, tensor<f32>, tensor<f32>) -> tensor<f32>
    %670 = stablehlo.broadcast_in_dim %669, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %671 = stablehlo.multiply %362, %670 : tensor<768x768xf32>
    %672 = call @norm(%arg9) : (tensor<768x768xf32>) -> tensor<1x1xf32>
    %cst_242 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %673 = stablehlo.broadcast_in_dim %cst_242, dims = [] : (tensor<f32>) -> tensor<1x1xf32>
    %674 = stablehlo.compare LE, %672, %673, FLOAT : (tensor<1x1xf32>, tensor<1x1xf32>) -> tensor<1x1xi1>
    %cst_243 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %675 = stablehlo.broadcast_in_dim %cst_243, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %676 = call @_where_0(%674, %675, %arg9) : (tensor<1x1xi1>, tensor<768x768xf32>, tensor<768x768xf32>) -> tensor<768x768xf32>
    %677 = stablehlo.reshape %672 : (tensor<1x1xf32>) -> tensor<f32>
    %678 = call @norm_1(%676) : (tensor<768x768xf32>) -> tensor<f32>
    %cst_244 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %679 = stablehlo.compare LE, %677, %cst_244, FLOAT : (tensor<f32>, tensor<f32>) -> tensor<i1>
    %cst_245 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %680 = call @_where_2(%679, %cst_245, %678) : (tensor<i1>, tensor<f32>, tensor<f32>) -> tensor<f32>
    %681 = call @norm(%368) : (tensor<768x768xf32>) -> tensor<1x1xf32>
    %cst_246 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %682 = stablehlo.broadcast_in_dim %cst_246, dims = [] : (tensor<f32>) -> tensor<1x1xf32>
    %683 = stablehlo.compare LE, %681, %682, FLOAT : (tensor<1x1xf32>, tensor<1x1xf32>) -> tensor<1x1xi1>
    %cst_247 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %684 = stablehlo.broadcast_in_dim %cst_247, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %685 = call @_where_0(%683, %684, %368) : (tensor<1x1xi1>, tensor<768x768xf32>, tensor<768x768xf32>) -> tensor<768x768xf32>
    %686 = stablehlo.reshape %681 : (tensor<1x1xf32>) -> tensor<f32>
    %687 = call @norm_1(%685) : (tensor<768x768xf32>) -> tensor<f32>
    %cst_248 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %688 = stablehlo.compare LE, %686, %cst_248, FLOAT : (tensor<f32>, tensor<f32>) -> tensor<i1>
    %cst_249 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %689 = call @_where_2(%688, %cst_249, %687) : (tensor<i1>, tensor<f32>, tensor<f32>) -> tensor<f32>
    %cst_250 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %690 = stablehlo.multiply %cst_250, %680 : tensor<f32>
    %cst_251 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %691 = stablehlo.add %689, %cst_251 : tensor<f32>
    %692 = stablehlo.divide %690, %691 : tensor<f32>
    %cst_252 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %693 = stablehlo.compare EQ, %680, %cst_252, FLOAT : (tensor<f32>, tensor<f32>) -> tensor<i1>
    %cst_253 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %694 = stablehlo.compare EQ, %689, %cst_253, FLOAT : (tensor<f32>, tensor<f32>) -> tensor<i1>
    %695 = stablehlo.or %693, %694 : tensor<i1>
    %cst_254 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %696 = call @_where_3(%695, %cst_254, %692) : (tensor<i1>, tensor<f32>, tensor<f32>) -> tensor<f32>
    %697 = stablehlo.broadcast_in_dim %696, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %698 = stablehlo.multiply %368, %697 : tensor<768x768xf32>
    %699 = call @norm(%arg10) : (tensor<768x768xf32>) -> tensor<1x1xf32>
    %cst_255 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %700 = stablehlo.broadcast_in_dim %cst_255, dims = [] : (tensor<f32>) -> tensor<1x1xf32>
    %701 = stablehlo.compare LE, %699, %700, FLOAT : (tensor<1x1xf32>, tensor<1x1xf32>) -> tensor<1x1xi1>
    %cst_256 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %702 = stablehlo.broadcast_in_dim %cst_256, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %703 = call @_where_0(%701, %702, %arg10) : (tensor<1x1xi1>, tensor<768x768xf32>, tensor<768x768xf32>) -> tensor<768x768xf32>
    %704 = stablehlo.reshape %699 : (tensor<1x1xf32>) -> tensor<f32>
    %705 = call @norm_1(%703) : (tensor<768x768xf32>) -> tensor<f32>
    %cst_257 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %706 = stablehlo.compare LE, %704, %cst_257, FLOAT : (tensor<f32>, tensor<f32>) -> tensor<i1>
    %cst_258 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %707 = call @_where_2(%706, %cst_258, %705) : (tensor<i1>, tensor<f32>, tensor<f32>) -> tensor<f32>
    %708 = call @norm(%374) : (tensor<768x768xf32>) -> tensor<1x1xf32>
    %cst_259 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %709 = stablehlo.broadcast_in_dim %cst_259, dims = [] : (tensor<f32>) -> tensor<1x1xf32>
    %710 = stablehlo.compare LE, %708, %709, FLOAT : (tensor<1x1xf32>, tensor<1x1xf32>) -> tensor<1x1xi1>
    %cst_260 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %711 = stablehlo.broadcast_in_dim %cst_260, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %712 = call @_where_0(%710, %711, %374) : (tensor<1x1xi1>, tensor<768x768xf32>, tensor<768x768xf32>) -> tensor<768x768xf32>
    %713 = stablehlo.reshape %708 : (tensor<1x1xf32>) -> tensor<f32>
    %714 = call @norm_1(%712) : (tensor<768x768xf32>) -> tensor<f32>
    %cst_261 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %715 = stablehlo.compare LE, %713, %cst_261, FLOAT : (tensor<f32>, tensor<f32>) -> tensor<i1>
    %cst_262 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %716 = call @_where_2(%715, %cst_262, %714) : (tensor<i1>, tensor<f32>, tensor<f32>) -> tensor<f32>
    %cst_263 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %717 = stablehlo.multiply %cst_263, %707 : tensor<f32>
    %cst_264 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %718 = stablehlo.add %716, %cst_264 : tensor<f32>
    %719 = stablehlo.divide %717, %718 : tensor<f32>
    %cst_265 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %720 = stablehlo.compare EQ, %707, %cst_265, FLOAT : (tensor<f32>, tensor<f32>) -> tensor<i1>
    %cst_266 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %721 = stablehlo.compare EQ, %716, %cst_266, FLOAT : (tensor<f32>, tensor<f32>) -> tensor<i1>
    %722 = stablehlo.or %720, %721 : tensor<i1>
    %cst_267 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %723 = call @_where_3(%722, %cst_267, %719) : (tensor<i1>, tensor<f32>, tensor<f32>) -> tensor<f32>
    %724 = stablehlo.broadcast_in_dim %723, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %725 = stablehlo.multiply %374, %724 : tensor<768x768xf32>
    %726 = call @norm(%arg11) : (tensor<768x768xf32>) -> tensor<1x1xf32>
    %cst_268 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %727 = stablehlo.broadcast_in_dim %cst_268, dims = [] : (tensor<f32>) -> tensor<1x1xf32>
    %728 = stablehlo.compare LE, %726, %727, FLOAT : (tensor<1x1xf32>, tensor<1x1xf32>) -> tensor<1x1xi1>
    %cst_269 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %729 = stablehlo.broadcast_in_dim %cst_269, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %730 = call @_where_0(%728, %729, %arg11) : (tensor<1x1xi1>, tensor<768x768xf32>, tensor<768x768xf32>) -> tensor<768x768xf32>
    %731 = stablehlo.reshape %726 : (tensor<1x1xf32>) -> tensor<f32>
    %732 = call @norm_1(%730) : (tensor<768x768xf32>) -> tensor<f32>
    %cst_270 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %733 = stablehlo.compare LE, %731, %cst_270, FLOAT : (tensor<f32>, tensor<f32>) -> tensor<i1>
    %cst_271 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %734 = call @_where_2(%733, %cst_271, %732) : (tensor<i1>, tensor<f32>, tensor<f32>) -> tensor<f32>
    %735 = call @norm(%380) : (tensor<768x768xf32>) -> tensor<1x1xf32>
    %cst_272 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %736 = stablehlo.broadcast_in_dim %cst_272, dims = [] : (tensor<f32>) -> tensor<1x1xf32>
    %737 = stablehlo.compare LE, %735, %736, FLOAT : (tensor<1x1xf32>, tensor<1x1xf32>) -> tensor<1x1xi1>
    %cst_273 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %738 = stablehlo.broadcast_in_dim %cst_273, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %739 = call @_where_0(%737, %738, %380) : (tensor<1x1xi1>, tensor<768x768xf32>, tensor<768x768xf32>) -> tensor<768x768xf32>
    %740 = stablehlo.reshape %735 : (tensor<1x1xf32>) -> tensor<f32>
    %741 = call @norm_1(%739) : (tensor<768x768xf32>) -> tensor<f32>
    %cst_274 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %742 = stablehlo.compare LE, %740, %cst_274, FLOAT : (tensor<f32>, tensor<f32>) -> tensor<i1>
    %cst_275 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %743 = call @_where_2(%742, %cst_275, %741) : (tensor<i1>, tensor<f32>, tensor<f32>) -> tensor<f32>
    %cst_276 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %744 = stablehlo.multiply %cst_276, %734 : tensor<f32>
    %cst_277 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %745 = stablehlo.add %743, %cst_277 : tensor<f32>
    %746 = stablehlo.divide %744, %745 : tensor<f32>
    %cst_278 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %747 = stablehlo.compare EQ, %734, %cst_278, FLOAT : (tensor<f32>, tensor<f32>) -> tensor<i1>
    %cst_279 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %748 = stablehlo.compare EQ, %743, %cst_279, FLOAT : (tensor<f32>, tensor<f32>) -> tensor<i1>
    %749 = stablehlo.or %747, %748 : tensor<i1>
    %cst_280 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %750 = call @_where_3(%749, %cst_280, %746) : (tensor<i1>, tensor<f32>, tensor<f32>) -> tensor<f32>
    %751 = stablehlo.broadcast_in_dim %750, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %752 = stablehlo.multiply %380, %751 : tensor<768x768xf32>
    %753 = call @norm(%arg12) : (tensor<768x768xf32>) -> tensor<1x1xf32>
    %cst_281 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %754 = stablehlo.broadcast_in_dim %cst_281, dims = [] : (tensor<f32>) -> tensor<1x1xf32>
    %755 = stablehlo.compare LE, %753, %754, FLOAT : (tensor<1x1xf32>, tensor<1x1xf32>) -> tensor<1x1xi1>
    %cst_282 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %756 = stablehlo.broadcast_in_dim %cst_282, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %757 = call @_where_0(%755, %756, %arg12) : (tensor<1x1xi1>, tensor<768x768xf32>, tensor<768x768xf32>) -> tensor<768x768xf32>
    %758 = stablehlo.reshape %753 : (tensor<1x1xf32>) -> tensor<f32>
    %759 = call @norm_1(%757) : (tensor<768x768xf32>) -> tensor<f32>
    %cst_283 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %760 = stablehlo.compare LE, %758, %cst_283, FLOAT : (tensor<f32>, tensor<f32>) -> tensor<i1>
    %cst_284 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %761 = call @_where_2(%760, %cst_284, %759) : (tensor<i1>, tensor<f32>, tensor<f32>) -> tensor<f32>
    %762 = call @norm(%386) : (tensor<768x768xf32>) -> tensor<1x1xf32>
    %cst_285 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %763 = stablehlo.broadcast_in_dim %cst_285, dims = [] : (tensor<f32>) -> tensor<1x1xf32>
    %764 = stablehlo.compare LE, %762, %763, FLOAT : (tensor<1x1xf32>, tensor<1x1xf32>) -> tensor<1x1xi1>
    %cst_286 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %765 = stablehlo.broadcast_in_dim %cst_286, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %766 = call @_where_0(%764, %765, %386) : (tensor<1x1xi1>, tensor<768x768xf32>, tensor<768x768xf32>) -> tensor<768x768xf32>
    %767 = stablehlo.reshape %762 : (tensor<1x1xf32>) -> tensor<f32>
    %768 = call @norm_1(%766) : (tensor<768x768xf32>) -> tensor<f32>
    %cst_287 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %769 = stablehlo.compare LE, %767, %cst_287, FLOAT : (tensor<f32>, tensor<f32>) -> tensor<i1>
    %cst_288 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %770 = call @_where_2(%769, %cst_288, %768) : (tensor<i1>, tensor<f32>, tensor<f32>) -> tensor<f32>
    %cst_289 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %771 = stablehlo.multiply %cst_289, %761 : tensor<f32>
    %cst_290 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %772 = stablehlo.add %770, %cst_290 : tensor<f32>
    %773 = stablehlo.divide %771, %772 : tensor<f32>
    %cst_291 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %774 = stablehlo.compare EQ, %761, %cst_291, FLOAT : (tensor<f32>, tensor<f32>) -> tensor<i1>
    %cst_292 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %775 = stablehlo.compare EQ, %770, %cst_292, FLOAT : (tensor<f32>, tensor<f32>) -> tensor<i1>
    %776 = stablehlo.or %774, %775 : tensor<i1>
    %cst_293 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %777 = call @_where_3(%776, %cst_293, %773) : (tensor<i1>, tensor<f32>, tensor<f32>) -> tensor<f32>
    %778 = stablehlo.broadcast_in_dim %777, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %779 = stablehlo.multiply %386, %778 : tensor<768x768xf32>
    %780 = call @norm(%arg13) : (tensor<768x768xf32>) -> tensor<1x1xf32>
    %cst_294 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %781 = stablehlo.broadcast_in_dim %cst_294, dims = [] : (tensor<f32>) -> tensor<1x1xf32>
    %782 = stablehlo.compare LE, %780, %781, FLOAT : (tensor<1x1xf32>, tensor<1x1xf32>) -> tensor<1x1xi1>
    %cst_295 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %783 = stablehlo.broadcast_in_dim %cst_295, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %784 = call @_where_0(%782, %783, %arg13) : (tensor<1x1xi1>, tensor<768x768xf32>, tensor<768x768xf32>) -> tensor<768x768xf32>
    %785 = stablehlo.reshape %780 : (tensor<1x1xf32>) -> tensor<f32>
    %786 = call @norm_1(%784) : (tensor<768x768xf32>) -> tensor<f32>
    %cst_296 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %787 = stablehlo.compare LE, %785, %cst_296, FLOAT : (tensor<f32>, tensor<f32>) -> tensor<i1>
    %cst_297 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %788 = call @_where_2(%787, %cst_297, %786) : (tensor<i1>, tensor<f32>, tensor<f32>) -> tensor<f32>
    %789 = call @norm(%392) : (tensor<768x768xf32>) -> tensor<1x1xf32>
    %cst_298 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %790 = stablehlo.broadcast_in_dim %cst_298, dims = [] : (tensor<f32>) -> tensor<1x1xf32>
    %791 = stablehlo.compare LE, %789, %790, FLOAT : (tensor<1x1xf32>, tensor<1x1xf32>) -> tensor<1x1xi1>
    %cst_299 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %792 = stablehlo.broadcast_in_dim %cst_299, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %793 = call @_where_0(%791, %792, %392) : (tensor<1x1xi1>, tensor<768x768xf32>, tensor<768x768xf32>) -> tensor<768x768xf32>
    %794 = stablehlo.reshape %789 : (tensor<1x1xf32>) -> tensor<f32>
    %795 = call @norm_1(%793) : (tensor<768x768xf32>) -> tensor<f32>
    %cst_300 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %796 = stablehlo.compare LE, %794, %cst_300, FLOAT : (tensor<f32>, tensor<f32>) -> tensor<i1>
    %cst_301 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %797 = call @_where_2(%796, %cst_301, %795) : (tensor<i1>, tensor<f32>, tensor<f32>) -> tensor<f32>
    %cst_302 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %798 = stablehlo.multiply %cst_302, %788 : tensor<f32>
    %cst_303 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %799 = stablehlo.add %797, %cst_303 : tensor<f32>
    %800 = stablehlo.divide %798, %799 : tensor<f32>
    %cst_304 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %801 = stablehlo.compare EQ, %788, %cst_304, FLOAT : (tensor<f32>, tensor<f32>) -> tensor<i1>
    %cst_305 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %802 = stablehlo.compare EQ, %797, %cst_305, FLOAT : (tensor<f32>, tensor<f32>) -> tensor<i1>
    %803 = stablehlo.or %801, %802 : tensor<i1>
    %cst_306 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %804 = call @_where_3(%803, %cst_306, %800) : (tensor<i1>, tensor<f32>, tensor<f32>) -> tensor<f32>
    %805 = stablehlo.broadcast_in_dim %804, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %806 = stablehlo.multiply %392, %805 : tensor<768x768xf32>
    %807 = call @norm(%arg14) : (tensor<768x768xf32>) -> tensor<1x1xf32>
    %cst_307 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %808 = stablehlo.broadcast_in_dim %cst_307, dims = [] : (tensor<f32>) -> tensor<1x1xf32>
    %809 = stablehlo.compare LE, %807, %808, FLOAT : (tensor<1x1xf32>, tensor<1x1xf32>) -> tensor<1x1xi1>
    %cst_308 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %810 = stablehlo.broadcast_in_dim %cst_308, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %811 = call @_where_0(%809, %810, %arg14) : (tensor<1x1xi1>, tensor<768x768xf32>, tensor<768x768xf32>) -> tensor<768x768xf32>
    %812 = stablehlo.reshape %807 : (tensor<1x1xf32>) -> tensor<f32>
    %813 = call @norm_1(%811) : (tensor<768x768xf32>) -> tensor<f32>
    %cst_309 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %814 = stablehlo.compare LE, %812, %cst_309, FLOAT : (tensor<f32>, tensor<f32>) -> tensor<i1>
    %cst_310 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %815 = call @_where_2(%814, %cst_310, %813) : (tensor<i1>, tensor<f32>, tensor<f32>) -> tensor<f32>
    %816 = call @norm(%398) : (tensor<768x768xf32>) -> tensor<1x1xf32>
    %cst_311 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %817 = stablehlo.broadcast_in_dim %cst_311, dims = [] : (tensor<f32>) -> tensor<1x1xf32>
    %818 = stablehlo.compare LE, %816, %817, FLOAT : (tensor<1x1xf32>, tensor<1x1xf32>) -> tensor<1x1xi1>
    %cst_312 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %819 = stablehlo.broadcast_in_dim %cst_312, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %820 = call @_where_0(%818, %819, %398) : (tensor<1x1xi1>, tensor<768x768xf32>, tensor<768x768xf32>) -> tensor<768x768xf32>
    %821 = stablehlo.reshape %816 : (tensor<1x1xf32>) -> tensor<f32>
    %822 = call @norm_1(%820) : (tensor<768x768xf32>) -> tensor<f32>
    %cst_313 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %823 = stablehlo.compare LE, %821, %cst_313, FLOAT : (tensor<f32>, tensor<f32>) -> tensor<i1>
    %cst_314 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %824 = call @_where_2(%823, %cst_314, %822) : (tensor<i1>, tensor<f32>, tensor<f32>) -> tensor<f32>
    %cst_315 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %825 = stablehlo.multiply %cst_315, %815 : tensor<f32>
    %cst_316 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %826 = stablehlo.add %824, %cst_316 : tensor<f32>
    %827 = stablehlo.divide %825, %826 : tensor<f32>
    %cst_317 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %828 = stablehlo.compare EQ, %815, %cst_317, FLOAT : (tensor<f32>, tensor<f32>) -> tensor<i1>
    %cst_318 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %829 = stablehlo.compare EQ, %824, %cst_318, FLOAT : (tensor<f32>, tensor<f32>) -> tensor<i1>
    %830 = stablehlo.or %828, %829 : tensor<i1>
    %cst_319 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %831 = call @_where_3(%830, %cst_319, %827) : (tensor<i1>, tensor<f32>, tensor<f32>) -> tensor<f32>
    %832 = stablehlo.broadcast_in_dim %831, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %833 = stablehlo.multiply %398, %832 : tensor<768x768xf32>
    %834 = call @norm(%arg15) : (tensor<768x768xf32>) -> tensor<1x1xf32>
    %cst_320 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %835 = stablehlo.broadcast_in_dim %cst_320, dims = [] : (tensor<f32>) -> tensor<1x1xf32>
    %836 = stablehlo.compare LE, %834, %835, FLOAT : (tensor<1x1xf32>, tensor<1x1xf32>) -> tensor<1x1xi1>
    %cst_321 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %837 = stablehlo.broadcast_in_dim %cst_321, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %838 = call @_where_0(%836, %837, %arg15) : (tensor<1x1xi1>, tensor<768x768xf32>, tensor<768x768xf32>) -> tensor<768x768xf32>
    %839 = stablehlo.reshape %834 : (tensor<1x1xf32>) -> tensor<f32>
    %840 = call @norm_1(%838) : (tensor<768x768xf32>) -> tensor<f32>
    %cst_322 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %841 = stablehlo.compare LE, %839, %cst_322, FLOAT : (tensor<f32>, tensor<f32>) -> tensor<i1>
    %cst_323 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %842 = call @_where_2(%841, %cst_323, %840) : (tensor<i1>, tensor<f32>, tensor<f32>) -> tensor<f32>
    %843 = call @norm(%404) : (tensor<768x768xf32>) -> tensor<1x1xf32>
    %cst_324 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %844 = stablehlo.broadcast_in_dim %cst_324, dims = [] : (tensor<f32>) -> tensor<1x1xf32>
    %845 = stablehlo.compare LE, %843, %844, FLOAT : (tensor<1x1xf32>, tensor<1x1xf32>) -> tensor<1x1xi1>
    %cst_325 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %846 = stablehlo.broadcast_in_dim %cst_325, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %847 = call @_where_0(%845, %846, %404) : (tensor<1x1xi1>, tensor<768x768xf32>, tensor<768x768xf32>) -> tensor<768x768xf32>
    %848 = stablehlo.reshape %843 : (tensor<1x1xf32>) -> tensor<f32>
    %849 = call @norm_1(%847) : (tensor<768x768xf32>) -> tensor<f32>
    %cst_326 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %850 = stablehlo.compare LE, %848, %cst_326, FLOAT : (tensor<f32>, tensor<f32>) -> tensor<i1>
    %cst_327 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %851 = call @_where_2(%850, %cst_327, %849) : (tensor<i1>, tensor<f32>, tensor<f32>) -> tensor<f32>
    %cst_328 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %852 = stablehlo.multiply %cst_328, %842 : tensor<f32>
    %cst_329 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %853 = stablehlo.add %851, %cst_329 : tensor<f32>
    %854 = stablehlo.divide %852, %853 : tensor<f32>
    %cst_330 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %855 = stablehlo.compare EQ, %842, %cst_330, FLOAT : (tensor<f32>, tensor<f32>) -> tensor<i1>
    %cst_331 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %856 = stablehlo.compare EQ, %851, %cst_331, FLOAT : (tensor<f32>, tensor<f32>) -> tensor<i1>
    %857 = stablehlo.or %855, %856 : tensor<i1>
    %cst_332 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %858 = call @_where_3(%857, %cst_332, %854) : (tensor<i1>, tensor<f32>, tensor<f32>) -> tensor<f32>
    %859 = stablehlo.broadcast_in_dim %858, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %860 = stablehlo.multiply %404, %859 : tensor<768x768xf32>
    %861 = call @norm(%arg16) : (tensor<768x768xf32>) -> tensor<1x1xf32>
    %cst_333 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %862 = stablehlo.broadcast_in_dim %cst_333, dims = [] : (tensor<f32>) -> tensor<1x1xf32>
    %863 = stablehlo.compare LE, %861, %862, FLOAT : (tensor<1x1xf32>, tensor<1x1xf32>) -> tensor<1x1xi1>
    %cst_334 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %864 = stablehlo.broadcast_in_dim %cst_334, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %865 = call @_where_0(%863, %864, %arg16) : (tensor<1x1xi1>, tensor<768x768xf32>, tensor<768x768xf32>) -> tensor<768x768xf32>
    %866 = stablehlo.reshape %861 : (tensor<1x1xf32>) -> tensor<f32>
    %867 = call @norm_1(%865) : (tensor<768x768xf32>) -> tensor<f32>
    %cst_335 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %868 = stablehlo.compare LE, %866, %cst_335, FLOAT : (tensor<f32>, tensor<f32>) -> tensor<i1>
    %cst_336 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %869 = call @_where_2(%868, %cst_336, %867) : (tensor<i1>, tensor<f32>, tensor<f32>) -> tensor<f32>
    %870 = call @norm(%410) : (tensor<768x768xf32>) -> tensor<1x1xf32>
    %cst_337 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %871 = stablehlo.broadcast_in_dim %cst_337, dims = [] : (tensor<f32>) -> tensor<1x1xf32>
    %872 = stablehlo.compare LE, %870, %871, FLOAT : (tensor<1x1xf32>, tensor<1x1xf32>) -> tensor<1x1xi1>
    %cst_338 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %873 = stablehlo.broadcast_in_dim %cst_338, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %874 = call @_where_0(%872, %873, %410) : (tensor<1x1xi1>, tensor<768x768xf32>, tensor<768x768xf32>) -> tensor<768x768xf32>
    %875 = stablehlo.reshape %870 : (tensor<1x1xf32>) -> tensor<f32>
    %876 = call @norm_1(%874) : (tensor<768x768xf32>) -> tensor<f32>
    %cst_339 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %877 = stablehlo.compare LE, %875, %cst_339, FLOAT : (tensor<f32>, tensor<f32>) -> tensor<i1>
    %cst_340 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %878 = call @_where_2(%877, %cst_340, %876) : (tensor<i1>, tensor<f32>, tensor<f32>) -> tensor<f32>
    %cst_341 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %879 = stablehlo.multiply %cst_341, %869 : tensor<f32>
    %cst_342 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %880 = stablehlo.add %878, %cst_342 : tensor<f32>
    %881 = stablehlo.divide %879, %880 : tensor<f32>
    %cst_343 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %882 = stablehlo.compare EQ, %869, %cst_343, FLOAT : (tensor<f32>, tensor<f32>) -> tensor<i1>
    %cst_344 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %883 = stablehlo.compare EQ, %878, %cst_344, FLOAT : (tensor<f32>, tensor<f32>) -> tensor<i1>
    %884 = stablehlo.or %882, %883 : tensor<i1>
    %cst_345 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %885 = call @_where_3(%884, %cst_345, %881) : (tensor<i1>, tensor<f32>, tensor<f32>) -> tensor<f32>
    %886 = stablehlo.broadcast_in_dim %885, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %887 = stablehlo.multiply %410, %886 : tensor<768x768xf32>
    %888 = call @norm(%arg17) : (tensor<768x768xf32>) -> tensor<1x1xf32>
    %cst_346 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %889 = stablehlo.broadcast_in_dim %cst_346, dims = [] : (tensor<f32>) -> tensor<1x1xf32>
    %890 = stablehlo.compare LE, %888, %889, FLOAT : (tensor<1x1xf32>, tensor<1x1xf32>) -> tensor<1x1xi1>
    %cst_347 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %891 = stablehlo.broadcast_in_dim %cst_347, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %892 = call @_where_0(%890, %891, %arg17) : (tensor<1x1xi1>, tensor<768x768xf32>, tensor<768x768xf32>) -> tensor<768x768xf32>
    %893 = stablehlo.reshape %888 : (tensor<1x1xf32>) -> tensor<f32>
    %894 = call @norm_1(%892) : (tensor<768x768xf32>) -> tensor<f32>
    %cst_348 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %895 = stablehlo.compare LE, %893, %cst_348, FLOAT : (tensor<f32>, tensor<f32>) -> tensor<i1>
    %cst_349 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %896 = call @_where_2(%895, %cst_349, %894) : (tensor<i1>, tensor<f32>, tensor<f32>) -> tensor<f32>
    %897 = call @norm(%416) : (tensor<768x768xf32>) -> tensor<1x1xf32>
    %cst_350 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %898 = stablehlo.broadcast_in_dim %cst_350, dims = [] : (tensor<f32>) -> tensor<1x1xf32>
    %899 = stablehlo.compare LE, %897, %898, FLOAT : (tensor<1x1xf32>, tensor<1x1xf32>) -> tensor<1x1xi1>
    %cst_351 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %900 = stablehlo.broadcast_in_dim %cst_351, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %901 = call @_where_0(%899, %900, %416) : (tensor<1x1xi1>, tensor<768x768xf32>, tensor<768x768xf32>) -> tensor<768x768xf32>
    %902 = stablehlo.reshape %897 : (tensor<1x1xf32>) -> tensor<f32>
    %903 = call @norm_1(%901) : (tensor<768x768xf32>) -> tensor<f32>
    %cst_352 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %904 = stablehlo.compare LE, %902, %cst_352, FLOAT : (tensor<f32>, tensor<f32>) -> tensor<i1>
    %cst_353 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %905 = call @_where_2(%904, %cst_353, %903) : (tensor<i1>, tensor<f32>, tensor<f32>) -> tensor<f32>
    %cst_354 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %906 = stablehlo.multiply %cst_354, %896 : tensor<f32>
    %cst_355 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %907 = stablehlo.add %905, %cst_355 : tensor<f32>
    %908 = stablehlo.divide %906, %907 : tensor<f32>
    %cst_356 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %909 = stablehlo.compare EQ, %896, %cst_356, FLOAT : (tensor<f32>, tensor<f32>) -> tensor<i1>
    %cst_357 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %910 = stablehlo.compare EQ, %905, %cst_357, FLOAT : (tensor<f32>, tensor<f32>) -> tensor<i1>
    %911 = stablehlo.or %909, %910 : tensor<i1>
    %cst_358 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %912 = call @_where_3(%911, %cst_358, %908) : (tensor<i1>, tensor<f32>, tensor<f32>) -> tensor<f32>
    %913 = stablehlo.broadcast_in_dim %912, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %914 = stablehlo.multiply %416, %913 : tensor<768x768xf32>
    %915 = call @norm(%arg18) : (tensor<768x768xf32>) -> tensor<1x1xf32>
    %cst_359 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %916 = stablehlo.broadcast_in_dim %cst_359, dims = [] : (tensor<f32>) -> tensor<1x1xf32>
    %917 = stablehlo.compare LE, %915, %916, FLOAT : (tensor<1x1xf32>, tensor<1x1xf32>) -> tensor<1x1xi1>
    %cst_360 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %918 = stablehlo.broadcast_in_dim %cst_360, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %919 = call @_where_0(%917, %918, %arg18) : (tensor<1x1xi1>, tensor<768x768xf32>, tensor<768x768xf32>) -> tensor<768x768xf32>
    %920 = stablehlo.reshape %915 : (tensor<1x1xf32>) -> tensor<f32>
    %921 = call @norm_1(%919) : (tensor<768x768xf32>) -> tensor<f32>
    %cst_361 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %922 = stablehlo.compare LE, %920, %cst_361, FLOAT : (tensor<f32>, tensor<f32>) -> tensor<i1>
    %cst_362 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %923 = call @_where_2(%922, %cst_362, %921) : (tensor<i1>, tensor<f32>, tensor<f32>) -> tensor<f32>
    %924 = call @norm(%422) : (tensor<768x768xf32>) -> tensor<1x1xf32>
    %cst_363 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %925 = stablehlo.broadcast_in_dim %cst_363, dims = [] : (tensor<f32>) -> tensor<1x1xf32>
    %926 = stablehlo.compare LE, %924, %925, FLOAT : (tensor<1x1xf32>, tensor<1x1xf32>) -> tensor<1x1xi1>
    %cst_364 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %927 = stablehlo.broadcast_in_dim %cst_364, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %928 = call @_where_0(%926, %927, %422) : (tensor<1x1xi1>, tensor<768x768xf32>, tensor<768x768xf32>) -> tensor<768x768xf32>
    %929 = stablehlo.reshape %924 : (tensor<1x1xf32>) -> tensor<f32>
    %930 = call @norm_1(%928) : (tensor<768x768xf32>) -> tensor<f32>
    %cst_365 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %931 = stablehlo.compare LE, %929, %cst_365, FLOAT : (tensor<f32>, tensor<f32>) -> tensor<i1>
    %cst_366 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %932 = call @_where_2(%931, %cst_366, %930) : (tensor<i1>, tensor<f32>, tensor<f32>) -> tensor<f32>
    %cst_367 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %933 = stablehlo.multiply %cst_367, %923 : tensor<f32>
    %cst_368 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %934 = stablehlo.add %932, %cst_368 : tensor<f32>
    %935 = stablehlo.divide %933, %934 : tensor<f32>
    %cst_369 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %936 = stablehlo.compare EQ, %923, %cst_369, FLOAT : (tensor<f32>, tensor<f32>) -> tensor<i1>
    %cst_370 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %937 = stablehlo.compare EQ, %932, %cst_370, FLOAT : (tensor<f32>, tensor<f32>) -> tensor<i1>
    %938 = stablehlo.or %936, %937 : tensor<i1>
    %cst_371 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %939 = call @_where_3(%938, %cst_371, %935) : (tensor<i1>, tensor<f32>, tensor<f32>) -> tensor<f32>
    %940 = stablehlo.broadcast_in_dim %939, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %941 = stablehlo.multiply %422, %940 : tensor<768x768xf32>
    %942 = call @norm(%arg19) : (tensor<768x768xf32>) -> tensor<1x1xf32>
    %cst_372 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %943 = stablehlo.broadcast_in_dim %cst_372, dims = [] : (tensor<f32>) -> tensor<1x1xf32>
    %944 = stablehlo.compare LE, %942, %943, FLOAT : (tensor<1x1xf32>, tensor<1x1xf32>) -> tensor<1x1xi1>
    %cst_373 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %945 = stablehlo.broadcast_in_dim %cst_373, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %946 = call @_where_0(%944, %945, %arg19) : (tensor<1x1xi1>, tensor<768x768xf32>, tensor<768x768xf32>) -> tensor<768x768xf32>
    %947 = stablehlo.reshape %942 : (tensor<1x1xf32>) -> tensor<f32>
    %948 = call @norm_1(%946) : (tensor<768x768xf32>) -> tensor<f32>
    %cst_374 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %949 = stablehlo.compare LE, %947, %cst_374, FLOAT : (tensor<f32>, tensor<f32>) -> tensor<i1>
    %cst_375 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %950 = call @_where_2(%949, %cst_375, %948) : (tensor<i1>, tensor<f32>, tensor<f32>) -> tensor<f32>
    %951 = call @norm(%428) : (tensor<768x768xf32>) -> tensor<1x1xf32>
    %cst_376 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %952 = stablehlo.broadcast_in_dim %cst_376, dims = [] : (tensor<f32>) -> tensor<1x1xf32>
    %953 = stablehlo.compare LE, %951, %952, FLOAT : (tensor<1x1xf32>, tensor<1x1xf32>) -> tensor<1x1xi1>
    %cst_377 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %954 = stablehlo.broadcast_in_dim %cst_377, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %955 = call @_where_0(%953, %954, %428) : (tensor<1x1xi1>, tensor<768x768xf32>, tensor<768x768xf32>) -> tensor<768x768xf32>
    %956 = stablehlo.reshape %951 : (tensor<1x1xf32>) -> tensor<f32>
    %957 = call @norm_1(%955) : (tensor<768x768xf32>) -> tensor<f32>
    %cst_378 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %958 = stablehlo.compare LE, %956, %cst_378, FLOAT : (tensor<f32>, tensor<f32>) -> tensor<i1>
    %cst_379 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %959 = call @_where_2(%958, %cst_379, %957) : (tensor<i1>, tensor<f32>, tensor<f32>) -> tensor<f32>
    %cst_380 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %960 = stablehlo.multiply %cst_380, %950 : tensor<f32>
    %cst_381 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %961 = stablehlo.add %959, %cst_381 : tensor<f32>
    %962 = stablehlo.divide %960, %961 : tensor<f32>
    %cst_382 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %963 = stablehlo.compare EQ, %950, %cst_382, FLOAT : (tensor<f32>, tensor<f32>) -> tensor<i1>
    %cst_383 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %964 = stablehlo.compare EQ, %959, %cst_383, FLOAT : (tensor<f32>, tensor<f32>) -> tensor<i1>
    %965 = stablehlo.or %963, %964 : tensor<i1>
    %cst_384 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %966 = call @_where_3(%965, %cst_384, %962) : (tensor<i1>, tensor<f32>, tensor<f32>) -> tensor<f32>
    %967 = stablehlo.broadcast_in_dim %966, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %968 = stablehlo.multiply %428, %967 : tensor<768x768xf32>
    %cst_385 = stablehlo.constant dense<-1.000000e-03> : tensor<f32>
    %969 = stablehlo.broadcast_in_dim %cst_385, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %970 = stablehlo.multiply %969, %455 : tensor<768x768xf32>
    %cst_386 = stablehlo.constant dense<-1.000000e-03> : tensor<f32>
    %971 = stablehlo.broadcast_in_dim %cst_386, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %972 = stablehlo.multiply %971, %482 : tensor<768x768xf32>
    %cst_387 = stablehlo.constant dense<-1.000000e-03> : tensor<f32>
    %973 = stablehlo.broadcast_in_dim %cst_387, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %974 = stablehlo.multiply %973, %509 : tensor<768x768xf32>
    %cst_388 = stablehlo.constant dense<-1.000000e-03> : tensor<f32>
    %975 = stablehlo.broadcast_in_dim %cst_388, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %976 = stablehlo.multiply %975, %536 : tensor<768x768xf32>
    %cst_389 = stablehlo.constant dense<-1.000000e-03> : tensor<f32>
    %977 = stablehlo.broadcast_in_dim %cst_389, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %978 = stablehlo.multiply %977, %563 : tensor<768x768xf32>
    %cst_390 = stablehlo.constant dense<-1.000000e-03> : tensor<f32>
    %979 = stablehlo.broadcast_in_dim %cst_390, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %980 = stablehlo.multiply %979, %590 : tensor<768x768xf32>
    %cst_391 = stablehlo.constant dense<-1.000000e-03> : tensor<f32>
    %981 = stablehlo.broadcast_in_dim %cst_391, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %982 = stablehlo.multiply %981, %617 : tensor<768x768xf32>
    %cst_392 = stablehlo.constant dense<-1.000000e-03> : tensor<f32>
    %983 = stablehlo.broadcast_in_dim %cst_392, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %984 = stablehlo.multiply %983, %644 : tensor<768x768xf32>
    %cst_393 = stablehlo.constant dense<-1.000000e-03> : tensor<f32>
    %985 = stablehlo.broadcast_in_dim %cst_393, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %986 = stablehlo.multiply %985, %671 : tensor<768x768xf32>
    %cst_394 = stablehlo.constant dense<-1.000000e-03> : tensor<f32>
    %987 = stablehlo.broadcast_in_dim %cst_394, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %988 = stablehlo.multiply %987, %698 : tensor<768x768xf32>
    %cst_395 = stablehlo.constant dense<-1.000000e-03> : tensor<f32>
    %989 = stablehlo.broadcast_in_dim %cst_395, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %990 = stablehlo.multiply %989, %725 : tensor<768x768xf32>
    %cst_396 = stablehlo.constant dense<-1.000000e-03> : tensor<f32>
    %991 = stablehlo.broadcast_in_dim %cst_396, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %992 = stablehlo.multiply %991, %752 : tensor<768x768xf32>
    %cst_397 = stablehlo.constant dense<-1.000000e-03> : tensor<f32>
    %993 = stablehlo.broadcast_in_dim %cst_397, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %994 = stablehlo.multiply %993, %779 : tensor<768x768xf32>
    %cst_398 = stablehlo.constant dense<-1.000000e-03> : tensor<f32>
    %995 = stablehlo.broadcast_in_dim %cst_398, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %996 = stablehlo.multiply %995, %806 : tensor<768x768xf32>
    %cst_399 = stablehlo.constant dense<-1.000000e-03> : tensor<f32>
    %997 = stablehlo.broadcast_in_dim %cst_399, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %998 = stablehlo.multiply %997, %833 : tensor<768x768xf32>
    %cst_400 = stablehlo.constant dense<-1.000000e-03> : tensor<f32>
    %999 = stablehlo.broadcast_in_dim %cst_400, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %1000 = stablehlo.multiply %999, %860 : tensor<768x768xf32>
    %cst_401 = stablehlo.constant dense<-1.000000e-03> : tensor<f32>
    %1001 = stablehlo.broadcast_in_dim %cst_401, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %1002 = stablehlo.multiply %1001, %887 : tensor<768x768xf32>
    %cst_402 = stablehlo.constant dense<-1.000000e-03> : tensor<f32>
    %1003 = stablehlo.broadcast_in_dim %cst_402, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %1004 = stablehlo.multiply %1003, %914 : tensor<768x768xf32>
    %cst_403 = stablehlo.constant dense<-1.000000e-03> : tensor<f32>
    %1005 = stablehlo.broadcast_in_dim %cst_403, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %1006 = stablehlo.multiply %1005, %941 : tensor<768x768xf32>
    %cst_404 = stablehlo.constant dense<-1.000000e-03> : tensor<f32>
    %1007 = stablehlo.broadcast_in_dim %cst_404, dims = [] : (tensor<f32>) -> tensor<768x768xf32>
    %1008 = stablehlo.multiply %1007, %968 : tensor<768x768xf32>
    %1009 = stablehlo.add %arg0, %970 : tensor<768x768xf32>
    %1010 = stablehlo.add %arg1, %972 : tensor<768x768xf32>
    %1011 = stablehlo.add %arg2, %974 : tensor<768x768xf32>
    %1012 = stablehlo.add %arg3, %976 : tensor<768x768xf32>
    %1013 = stablehlo.add %arg4, %978 : tensor<768x768xf32>
    %1014 = stablehlo.add %arg5, %980 : tensor<768x768xf32>
    %1015 = stablehlo.add %arg6, %982 : tensor<768x768xf32>
    %1016 = stablehlo.add %arg7, %984 : tensor<768x768xf32>
    %1017 = stablehlo.add %arg8, %986 : tensor<768x768xf32>
    %1018 = stablehlo.add %arg9, %988 : tensor<768x768xf32>
    %1019 = stablehlo.add %arg10, %990 : tensor<768x768xf32>
    %1020 = stablehlo.add %arg11, %992 : tensor<768x768xf32>
    %1021 = stablehlo.add %arg12, %994 : tensor<768x768xf32>
    %1022 = stablehlo.add %arg13, %996 : tensor<768x768xf32>
    %1023 = stablehlo.add %arg14, %998 : tensor<768x768xf32>
    %1024 = stablehlo.add %arg15, %1000 : tensor<768x768xf32>
    %1025 = stablehlo.add %arg16, %1002 : tensor<768x768xf32>
    %1026 = stablehlo.add %arg17, %1004 : tensor<768x768xf32>
    %1027 = stablehlo.add %arg18, %1006 : tensor<768x768xf32>
    %1028 = stablehlo.add %arg19, %1008 : tensor<768x768xf32>
    return %1009, %1010, %1011, %1012, %1013, %1014, %1015, %1016, %1017, %1018, %1019, %1020, %1021, %1022, %1023, %1024, %1025, %1026, %1027, %1028, %222, %4, %9, %14, %19, %24, %29, %34, %39, %44, %49, %54, %59, %64, %69, %74, %79, %84, %89, %94, %99, %105, %111, %117, %123, %129, %135, %141, %147, %153, %159, %165, %171, %177, %183, %189, %195, %201, %207, %213, %219 : tensor<768x768xf32>, tensor<768x768xf32>, tensor<768x768xf32>, tensor<768x768xf32>, tensor<768x768xf32>, tensor<768x768xf32>, tensor<768x768xf32>, tensor<768x768xf32>, tensor<768x768xf32>, tensor<768x768xf32>, tensor<768x768xf32>, tensor<768x768xf32>, tensor<768x768xf32>, tensor<768x768xf32>, tensor<768x768xf32>, tensor<768x768xf32>, tensor<768x768xf32>, tensor<768x768xf32>, tensor<768x768xf32>, tensor<768x768xf32>, tensor<i32>, tensor<768x768xf32>, tensor<768x768xf32>, tensor<768x768xf32>, tensor<768x768xf32>, tensor<768x768xf32>, tensor<768x768xf32>, tensor<768x768xf32>, tensor<768x768xf32>, tensor<768x768xf32>, tensor<768x768xf32>, tensor<768x768xf32>, tensor<768x768xf32>, tensor<768x768xf32>, tensor<768x768xf32>, tensor<768x768xf32>, tensor<768x768xf32>, tensor<768x768xf32>, tensor<768x768xf32>, tensor<768x768xf32>, tensor<768x768xf32>, tensor<768x768xf32>, tensor<768x768xf32>, tensor<768x768xf32>, tensor<768x768xf32>, tensor<768x768xf32>, tensor<768x768xf32>, tensor<768x768xf32>, tensor<768x768xf32>, tensor<768x768xf32>, tensor<768x768xf32>, tensor<768x768xf32>, tensor<768x768xf32>, tensor<768x768xf32>, tensor<768x768xf32>, tensor<768x768xf32>, tensor<768x768xf32>, tensor<768x768xf32>, tensor<768x768xf32>, tensor<768x768xf32>, tensor<768x768xf32>
  }
  func.func private @_where(%arg0: tensor<i1>, %arg1: tensor<i32>, %arg2: tensor<i32>) -> tensor<i32> {
    %0 = stablehlo.select %arg0, %arg1, %arg2 : tensor<i1>, tensor<i32>
    return %0 : tensor<i32>
  }
  func.func private @norm(%arg0: tensor<768x768xf32>) -> tensor<1x1xf32> {
    %0 = stablehlo.multiply %arg0, %arg0 : tensor<768x768xf32>
    %cst = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %1 = stablehlo.reduce(%0 init: %cst) applies stablehlo.add across dimensions = [0, 1] : (tensor<768x768xf32>, tensor<f32>) -> tensor<f32>
    %2 = stablehlo.broadcast_in_dim %1, dims = [] : (tensor<f32>) -> tensor<1x1xf32>
    %3 = stablehlo.sqrt %2 : tensor<1x1xf32>
    return %3 : tensor<1x1xf32>
  }
  func.func private @_where_0(%arg0: tensor<1x1xi1>, %arg1: tensor<768x768xf32>, %arg2: tensor<768x768xf32>) -> tensor<768x768xf32> {
    %0 = stablehlo.broadcast_in_dim %arg0, dims = [0, 1] : (tensor<1x1xi1>) -> tensor<768x768xi1>
    %1 = stablehlo.select %0, %arg1, %arg2 : tensor<768x768xi1>, tensor<768x768xf32>
    return %1 : tensor<768x768xf32>
  }
  func.func private @norm_1(%arg0: tensor<768x768xf32>) -> tensor<f32> {
    %0 = stablehlo.multiply %arg0, %arg0 : tensor<768x768xf32>
    %cst = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %1 = stablehlo.reduce(%0 init: %cst) applies stablehlo.add across dimensions = [0, 1] : (tensor<768x768xf32>, tensor<f32>) -> tensor<f32>
    %2 = stablehlo.sqrt %1 : tensor<f32>
    return %2 : tensor<f32>
  }
  func.func private @_where_2(%arg0: tensor<i1>, %arg1: tensor<f32>, %arg2: tensor<f32>) -> tensor<f32> {
    %0 = stablehlo.convert %arg1 : tensor<f32>
    %1 = stablehlo.select %arg0, %0, %arg2 : tensor<i1>, tensor<f32>
    return %1 : tensor<f32>
  }
  func.func private @_where_3(%arg0: tensor<i1>, %arg1: tensor<f32>, %arg2: tensor<f32>) -> tensor<f32> {
    %0 = stablehlo.select %arg0, %arg1, %arg2 : tensor<i1>, tensor<f32>
    return %0 : tensor<f32>
  }
}
